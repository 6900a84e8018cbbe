"""Trains models on images with labels or captions, and evaluates them."""
