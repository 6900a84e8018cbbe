"""Clustering: spherical k-means over unit embeddings, exact nearest centers, and how good the clusters are."""
