"""The dialect of our own routes."""
