"""The variants of ImageNet: their class maps, and zero-shot classification on them."""
