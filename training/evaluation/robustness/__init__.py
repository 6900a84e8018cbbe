"""The variants of ImageNet: their class maps, and zero-shot classification among these classes."""
