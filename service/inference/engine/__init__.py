"""The engines that compute embeddings: a supervised process, or Triton."""
