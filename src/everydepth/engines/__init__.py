"""Write depths as files for inference engines; each file is run in its engine before it is kept.

Nothing here imports torch unless a torch model is given.
"""
