"""Evaluators of representations: each yields (name, value) pairs."""
