"""The API keys and their rate limits."""
