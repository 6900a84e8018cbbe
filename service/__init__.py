"""The server of models, with REST in front and an encoder behind. It contains no science."""
