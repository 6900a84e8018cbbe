"""Vectors that were computed before: in this process, and in Redis where there is one. Never needed, only faster."""
