"""The starter: a model of images and texts, built offline from PyPI packages."""
