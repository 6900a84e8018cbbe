"""Names clusters and reports the evidence. Works on arrays only: no file access, no model."""
