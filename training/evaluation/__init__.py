"""Evaluators: representations in, (name, value) out."""
