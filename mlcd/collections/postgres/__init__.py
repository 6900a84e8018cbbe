"""Collections in Postgres with pgvector, which many servers write and search at once."""
