"""Losses: pure functions on logits. What makes logits of embeddings and centers is in `margins` and `negatives`."""
