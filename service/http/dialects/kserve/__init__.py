"""KServe's Open Inference Protocol (v2) over HTTP, with the extensions of Triton."""
