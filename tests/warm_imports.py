"""Everything that engines, learner ranks and whole runs import, and nothing else: it starts no
thread and computes nothing. Imported by the server that tests/forked.py forks processes from."""

from __future__ import annotations

import gc
import importlib
import os

import setproctitle

# DeepSpeed before vLLM, which puts a placeholder in the place of triton.
MODULES = (
    "local_cluster",
    "rlcore.cli",
    "rlcore.commands.train",
    "deepspeed",
    "peft",
    "rlcore.learner.rank",
    "rlcore.learner.engines.deepspeed",
    "rlcore.rollout.engines.vllm.engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    # by DeepSpeed at every stage above 0; imports torch's compiler, which takes seconds
    "deepspeed.runtime.zero.muon.muon_optimizer",
)

_before = dict(os.environ)
os.environ["DS_ACCELERATOR"] = "cpu"
for _module in MODULES:
    importlib.import_module(_module)

# Variables that this module and its imports have set.
MADE = {name: value for name, value in os.environ.items() if _before.get(name) != value}

# A process finds the memory of its title by the environment, which its forks replace.
setproctitle.setproctitle("rlcore: warm imports")
gc.collect()
gc.freeze()  # no pass of a fork looks at what is there already: DeepSpeed asks for whole ones
