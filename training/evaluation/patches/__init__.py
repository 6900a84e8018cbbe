"""Pictures of what the patches of a tower have in common."""
