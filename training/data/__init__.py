"""Samples, their order and their augmentation, each a pure function of (seed, position)."""
