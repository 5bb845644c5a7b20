"""Start a run somewhere: on this machine, an existing Ray cluster, Slurm, or Kubernetes.

Imports no Ray.
"""

from rlcore.launch.job import Rendered, launch, render

__all__ = ["Rendered", "launch", "render"]
