"""What computes embeddings: a supervised process, or Triton."""
