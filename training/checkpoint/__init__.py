"""Checkpoints: everything that must survive a crash, on disk."""
