"""Data parallelism of the towers, and the settings of precision, memory and sharding."""
