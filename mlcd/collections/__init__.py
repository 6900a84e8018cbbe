"""Collections: named sets of images that can be searched."""
