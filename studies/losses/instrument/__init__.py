"""The instrument of the quick tiers: slices of runs, their rows, the asked images, the analysis."""
