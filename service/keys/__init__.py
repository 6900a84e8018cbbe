"""The API keys and their rates."""
