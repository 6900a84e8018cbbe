"""Samples, their order and augmentation, each a pure function of seed and stream position."""
