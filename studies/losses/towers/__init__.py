"""The towers tier: does what the frozen tier finds carry over to training from pixels (E2)?"""
