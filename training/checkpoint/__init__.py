"""Checkpoints: the state that must survive a crash, on disk."""
