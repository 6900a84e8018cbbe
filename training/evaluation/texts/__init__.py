"""Evaluations of models with towers of images and texts: zero-shot classification and retrieval."""
