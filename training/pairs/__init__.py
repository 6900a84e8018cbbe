"""Training on pairs of images and captions: both towers, or the text tower with a frozen image
tower.
"""
