"""The files of clustering that import torch; the scan opens them where torch is installed."""
