"""Training on a Ray cluster: its workers, and the progress that they report to the driver."""
