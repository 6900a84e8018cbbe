"""Training on a Ray cluster: its workers, and what they tell their driver."""
