"""The five papers behind everydepth: their claims, their results as recipes, their constructions.

Everything here uses `everydepth` as any user would; `everydepth` knows nothing of it. The commands
`claims` and `reproduce` are entry points.
"""
