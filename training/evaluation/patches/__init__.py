"""Pictures of the principal components of a tower's patch features."""
