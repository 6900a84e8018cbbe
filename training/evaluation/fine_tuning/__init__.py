"""End-to-end fine-tuning on a data set with classes, for comparison with the linear probe."""
