"""The way of image bytes to embeddings: admission, decoding, batching, an engine.

No module here knows HTTP.
"""
