"""The pipelines: one artifact directory in, one out, resumable after any crash."""
