"""Names for clusters, with reasons: arrays in, names out; no file and no engine is touched."""
