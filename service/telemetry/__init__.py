"""The logs, metrics and traces for operators."""
