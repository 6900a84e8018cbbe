"""Batch jobs: millions of images, nothing lost, nothing twice."""
