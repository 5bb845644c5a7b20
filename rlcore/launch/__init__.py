"""Start a run somewhere: on this machine, an existing Ray cluster, Slurm, or Kubernetes.

Imports no Ray.
"""

from rlcore.launch.job import launch, render
from rlcore.launch.rendering import Rendered

__all__ = ["Rendered", "launch", "render"]
