"""The frozen tier: losses compared on fixed features, thousands of runs of seconds (E1)."""
