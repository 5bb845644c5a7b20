"""Start a run somewhere: on this machine, an existing Ray cluster, Slurm, or Kubernetes.

Imports no Ray.
"""
