"""What the rows of the quick tiers say: the analysis of the study that decides."""
