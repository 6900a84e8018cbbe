"""Makes checkpoints: reads images and labels artifacts, trains, evaluates."""
