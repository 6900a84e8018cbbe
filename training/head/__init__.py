"""The classifier (Eq. 3 to 5): class centers sharded over processes, their loss and optimizer."""
