"""Matrix kernels of a run's processes on the CPU (`cluster.cpu_fast_paths`)."""
