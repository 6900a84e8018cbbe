"""Loss functions on logits. `margins`, `negatives` and `positives` choose and adjust the classes of
the logits.
"""
