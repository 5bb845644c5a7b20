"""Rollout actors: the vLLM engine wrapper, the worker thread that drives it, and what makes an actor cheap."""

import os

# Read by vLLM when it is imported, so they are set by the package that imports it. The engine lives in the actor's own
# process (weights are loaded between two steps, without a second hop), and nothing is looked up or reported outside.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads can hang
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks of an engine share the cores they are given
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)
