"""The optional cache of embeddings, in this process and in Redis."""
