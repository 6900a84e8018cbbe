"""Collections: named, searchable sets of image embeddings with metadata and thumbnails."""
