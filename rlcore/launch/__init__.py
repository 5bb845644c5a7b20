"""Starting a run somewhere: on this machine, an existing Ray cluster, Slurm, or Kubernetes. Imports no Ray."""

from rlcore.launch.job import LaunchSettings, Rendered, launch, render

__all__ = ["LaunchSettings", "Rendered", "launch", "render"]
