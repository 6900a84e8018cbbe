"""The pipelines whose work a Ray cluster does: its session, its workers and its calls."""
