"""The REST server of models. Algorithms are in the other packages of mlcd."""
