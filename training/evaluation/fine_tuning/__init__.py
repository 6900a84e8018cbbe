"""End-to-end fine-tuning on a data set of classes, beside the linear probe."""
