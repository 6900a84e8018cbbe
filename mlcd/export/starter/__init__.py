"""The starter: a model of images and texts that is put together from packages of PyPI, offline."""
