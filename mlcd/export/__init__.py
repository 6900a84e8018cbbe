"""The forms of models that others load: ONNX, Hugging Face and Triton, behind one gate
of parity.
"""
