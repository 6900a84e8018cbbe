"""Collections in Postgres with pgvector, which many servers can write and search at once."""
