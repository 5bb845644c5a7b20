"""Faults from inside a process, for `benchmarks/faults.py`: put on PYTHONPATH, chosen by RLCORE_FAULT, never shipped.

Python imports this file in every process of the run. It waits for the module that the fault belongs to and changes one
function there. RLCORE_FAULT_MARK names a file: a fault that happens once creates it, so its mtime is when it happened.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

FAULT, MARK = os.environ.get("RLCORE_FAULT", ""), os.environ.get("RLCORE_FAULT_MARK", "")


def once() -> bool:
    """True for one caller in all processes of the run."""
    try:
        os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def lost_tensor(module):
    """The engine's third update says it loaded everything and leaves one tensor as it was."""
    load = module.WeightExtension.rl_load
    updates = [0]

    def rl_load(self, tensors, quantised):
        updates[0] += 1
        kept = next(p for n, p in self.model_runner.model.named_parameters() if "o_proj" in n)
        before = kept.detach().clone()
        load(self, tensors, quantised)
        if updates[0] == 3 and once():
            kept.data.copy_(before)

    module.WeightExtension.rl_load = rl_load


def nan_loss(module):
    """One weight of the learner becomes NaN before the fourth step."""
    run = module.Update.run

    def broken(self, batch, step, *, first):
        if step == 3 and once():
            next(self.engine.policy.parameters()).data.view(-1)[:] = float("nan")
        return run(self, batch, step, first=first)

    module.Update.run = broken


def slow_actor(module):
    """The first engine to start takes ten times as long for every step."""
    start, step = module.VllmEngine.__init__, module.VllmEngine.step

    def init(self, **arguments):
        start(self, **arguments)
        self._slow = once()

    def slow(self):
        begun = time.monotonic()
        out = step(self)
        if getattr(self, "_slow", False):
            time.sleep(9 * (time.monotonic() - begun))
        return out

    module.VllmEngine.__init__, module.VllmEngine.step = init, slow


TARGETS = {
    "lost_tensor": ("rlcore.rollout.worker_extension", lost_tensor),
    "nan_loss": ("rlcore.learner.update", nan_loss),
    "slow_actor": ("rlcore.rollout.vllm_engine", slow_actor),
}


class Hook(importlib.abc.MetaPathFinder):
    """Applies the fault right after its module was executed."""

    def find_spec(self, name, path=None, target=None):
        wanted, fault = TARGETS[FAULT]
        if name != wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            fault(module)

        spec.loader.exec_module = exec_module
        return spec


if FAULT in TARGETS:
    sys.meta_path.insert(0, Hook())
elif FAULT == "clock_jump":
    real = time.time
    # once the file is there, the wall clock of every Python process stands a day ahead
    time.time = lambda: real() + (86400 if os.path.exists(MARK) else 0)
