"""Multi-label cluster discrimination: raw images to embeddings, clusters and labels."""

__version__ = "0.1.0"
