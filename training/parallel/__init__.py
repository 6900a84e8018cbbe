"""The towers over processes."""
