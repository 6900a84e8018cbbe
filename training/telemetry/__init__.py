"""The numbers that a run reports while it goes on."""
