"""Exports models for ONNX, Hugging Face and Triton, each after a check of parity."""
