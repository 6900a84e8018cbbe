"""The collections: named sets of images that can be searched."""
