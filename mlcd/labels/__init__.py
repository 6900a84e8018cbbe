"""Labels: which centers each sample belongs to."""
