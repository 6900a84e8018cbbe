"""The project's own routes, one file per resource."""
