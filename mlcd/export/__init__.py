"""Models in the forms that others load: ONNX, Hugging Face and Triton, behind one gate of parity."""
