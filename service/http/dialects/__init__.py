"""The dialects of the API, by the servers they come from: routes, wire models, refusals."""
