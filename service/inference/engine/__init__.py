"""The engines that compute embeddings: a supervised process, and Triton."""
