"""API keys and their rates."""
