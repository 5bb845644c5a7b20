"""Norms and compute threads of a rank on the CPU (`cluster.cpu_fast_paths`)."""
