"""The models: vision transformers, and the servable form in which they are exported."""
