"""Architectures: one file a family, and the table that names them."""
