"""The dialect of KServe's Open Inference Protocol (v2) over HTTP, with Triton's extensions."""
