"""`everydepth claims` and `everydepth reproduce`."""
