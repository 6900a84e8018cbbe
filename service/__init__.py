"""Serves models: REST in front, an encoder behind. Holds no science."""
