"""The images: their sources, the decoding of bytes to pixels, and the preparation of pixels for
encoders.
"""
