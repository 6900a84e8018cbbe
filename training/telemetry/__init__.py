"""The metrics that a run reports while it trains."""
