"""The languages of other servers: routes, wire models and the shape of a refusal."""
