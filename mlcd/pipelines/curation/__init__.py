"""The parts of a curation: the decision on each image, the steps that make it, and its page."""
