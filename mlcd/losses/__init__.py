"""The losses: pure functions on logits. `margins` and `negatives` make the logits from embeddings
and centers.
"""
