"""The clustering room: spherical k-means over unit embeddings, exact nearest centers, and measures
of how good clusters are.
"""
