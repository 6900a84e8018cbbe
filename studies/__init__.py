"""Studies: what a choice of the method is worth, measured over seeds."""
