"""Logs, metrics and traces for operators."""
