"""Collections in Milvus, which many servers can write and search at the same time."""
