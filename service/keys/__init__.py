"""API keys: who may enter, and how much."""
