"""Training with a classifier: the loss of Eq. 3 to 5 over class centers that are sharded over
processes, their optimizer, and the state of tower and centers with its checkpoints.
"""
