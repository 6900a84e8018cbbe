"""Evaluations of representations: k-NN, clusters, probes, fine-tuning, zero-shot, retrieval."""
