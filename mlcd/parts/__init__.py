"""The artifacts that are made part by part: claims, workers, inputs and the contents of a part."""
