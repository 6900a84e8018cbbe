"""The data sets of CLIP's evaluation."""
