"""Decoding on the CPU without vLLM's scheduler, modules and sampler (`cluster.cpu_fast_paths`)."""
