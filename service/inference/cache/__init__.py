"""The cache of embeddings: in this process, and in Redis where there is one.

It only makes the server faster, which never needs it.
"""
