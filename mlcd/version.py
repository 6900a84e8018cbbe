"""The package's version, which manifests, requests and `mlcd --version` state."""

__version__ = "0.1.0"
