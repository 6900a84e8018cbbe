"""The wire models of our own routes."""
