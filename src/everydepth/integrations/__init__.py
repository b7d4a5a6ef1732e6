"""Other people's loops: what they need beside the module itself. Imported by name, never by us."""
