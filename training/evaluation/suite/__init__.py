"""The data sets of CLIP's evaluation: their definitions, and the evaluation of present ones."""
