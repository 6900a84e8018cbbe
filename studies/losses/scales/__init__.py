"""The scales tier: a learned scale and bias, and the batch size of losses of pairs (E4).

Eq. 5's bias is SigLIP's, so that the question of where it starts is the same.
"""
