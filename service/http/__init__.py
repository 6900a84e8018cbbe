"""The HTTP layer: the application, its middleware, routes and dialects."""
