"""The composition root: Ray shells around the stages, the loop that moves references between them, run checkpoints.

This is the one package that imports Ray and the one (with `cli`) that reads configuration.
"""
