"""Training on pairs of images and captions: two towers, or a text tower beside a frozen image
tower.
"""
