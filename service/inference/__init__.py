"""Image bytes to embeddings: admission, decoding, batching, an engine. Knows no HTTP."""
