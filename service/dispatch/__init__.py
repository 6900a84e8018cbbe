"""From bytes to embeddings inside the service: admission, decoding, batching."""
