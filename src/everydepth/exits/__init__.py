"""Using a depth: choose it, export it, leave early, decode with it."""
