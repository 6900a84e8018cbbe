"""Our own routes, one file per resource; each parses a request, calls a service and maps errors."""
