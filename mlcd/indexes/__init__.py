"""The indexes, which find the nearest of many vectors; one file per engine."""
