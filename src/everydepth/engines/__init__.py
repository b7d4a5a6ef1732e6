"""Depths as files of the engines people run models with, each run there before it is kept.

Nothing here needs torch before a model of torch is given.
"""
