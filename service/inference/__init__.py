"""Turns image bytes into embeddings: admission, decoding, batching, engines.

No module here depends on HTTP.
"""
