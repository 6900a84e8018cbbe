"""The project's own routes, one file per resource; each parses, calls and maps errors."""
