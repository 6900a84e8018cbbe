"""The data sets of CLIP's evaluation: their definitions, and the run of all that are there."""
