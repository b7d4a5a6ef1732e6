"""What structure cannot tell: one file per family, and the table that names them."""
