"""The kinds of artifacts, one file each, over their manifest: directories that are
whole or absent.
"""
