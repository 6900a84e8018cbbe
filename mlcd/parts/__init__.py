"""Artifacts made part by part: claims, workers, inputs and what a part holds."""
