"""The analysis of the study that decides, over the rows of the quick tiers."""
