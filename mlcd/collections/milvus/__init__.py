"""Collections in Milvus, which many servers write and search at once."""
