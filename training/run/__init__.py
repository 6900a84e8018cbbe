"""The composition root of training: builds the objects of a config and runs the loop."""
