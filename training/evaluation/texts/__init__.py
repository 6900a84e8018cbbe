"""Evaluations of models with an image and a text tower: zero-shot classification, retrieval."""
