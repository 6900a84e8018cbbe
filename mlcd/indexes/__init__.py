"""Nearest-neighbor indexes over many vectors; one file per engine."""
