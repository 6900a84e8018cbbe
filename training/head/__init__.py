"""Training with a classifier: the loss of Eq. 3 to 5 over class centers sharded over processes, the
centers' optimizer, and the training state with its checkpoints.
"""
