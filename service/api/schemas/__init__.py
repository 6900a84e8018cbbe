"""Wire models: one file per dialect."""
