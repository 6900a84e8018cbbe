"""Indexes: nearest vectors among many, one file per engine."""
