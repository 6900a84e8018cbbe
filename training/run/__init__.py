"""The composition root of training: a config becomes objects, and these go through the loop."""
