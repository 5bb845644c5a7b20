"""Fault injection into the processes of a run, and a log of what was trained on.

`benchmarks/faults/job.py` puts this folder on PYTHONPATH, so that Python imports this file in every
process of the run. It waits until the module of a fault is imported and changes one function there.

RLCORE_FAULT names the fault. RLCORE_FAULT_MARK names a file: a fault that happens once creates it;
a fault that waits for a signal happens when, or while, the file exists. RLCORE_TRAINED names the
log: one line for each optimizer step of a learner rank, with the groups of its share.
"""

import builtins
import functools
import importlib.abc
import importlib.machinery
import io
import json
import os
import signal
import sys
import time

FAULT = os.environ.get("RLCORE_FAULT", "")
MARK = os.environ.get("RLCORE_FAULT_MARK", "")
TRAINED = os.environ.get("RLCORE_TRAINED", "")


def once() -> bool:
    """True for exactly one caller among all processes of the run."""
    try:
        os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def lost_tensor(module):
    """The third weight update reports success but leaves one tensor unchanged."""
    load = module.WeightExtension.rl_load
    updates = [0]

    def rl_load(self, tensors):
        updates[0] += 1
        kept = next(p for n, p in self.model_runner.model.named_parameters() if "o_proj" in n)
        before = kept.detach().clone()
        load(self, tensors)
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
    """The first engine that starts takes ten times as long for every step."""
    start, step = module.VllmEngine.__init__, module.VllmEngine.step

    def init(self, *args, **arguments):
        start(self, *args, **arguments)
        self.injected_slow = once()

    def slow(self):
        begun = time.monotonic()
        out = step(self)
        if getattr(self, "injected_slow", False):
            time.sleep(9 * (time.monotonic() - begun))
        return out

    module.VllmEngine.__init__, module.VllmEngine.step = init, slow


def killed_in_backward(module):
    """When the mark exists, a learner rank kills itself half-way through a backward pass."""
    init = module.ZeroEngine.__init__

    def kill(gradient):
        if os.path.exists(MARK):
            os.unlink(MARK)
            os.kill(os.getpid(), signal.SIGKILL)

    def hooked(self, *args, **arguments):
        init(self, *args, **arguments)
        trained = list(self.trained.values())
        trained[len(trained) // 2].register_hook(kill)

    module.ZeroEngine.__init__ = hooked


def killed_at_commit(module):
    """When the mark exists, the driver kills itself after a step was trained, while what was
    published before it is being loaded, and before the buffer knows of it."""
    commit = module.RayBuffer.commit

    async def killed(self, step):
        if os.path.exists(MARK):
            os.unlink(MARK)
            os.kill(os.getpid(), signal.SIGKILL)
        await commit(self, step)

    module.RayBuffer.commit = killed


def record(module):
    """Logs the groups of every optimizer step as the learner received them, independently of the
    buffer's ledger."""
    begin, step = module.LearnerRank.begin_phase, module.LearnerRank.train_step

    def begin_phase(self, groups_per_step, **arguments):
        self._given = [[g.group_id for g in groups] for groups in groups_per_step]
        return begin(self, groups_per_step, **arguments)

    def train_step(self, number):
        metrics = step(self, number)
        groups = self._given.pop(0)
        self._given.append(groups)  # another epoch begins with them again
        line = {"step": number, "rank": self.rank, "groups": groups}
        # one write of less than a page: lines of several ranks do not mix
        with open(TRAINED, "a") as file:
            file.write(json.dumps(line) + "\n")
        return metrics

    module.LearnerRank.begin_phase, module.LearnerRank.train_step = begin_phase, train_step


def talking_roles(module):
    """The process of every role says its name on its standard error as it starts."""
    for name in [name for name in vars(module) if name.endswith("Actor")]:
        role = getattr(module, name)

        def init(self, *args, __role=role, __init=role.__init__, **arguments):
            print(f"{__role.__name__} is here", file=sys.stderr, flush=True)
            __init(self, *args, **arguments)

        role.__init__ = functools.wraps(role.__init__)(init)


def fill_disk():
    """While the mark exists, every file opened for writing below `checkpoints` is /dev/full."""
    real = builtins.open

    def full(file, mode="r", *args, **arguments):
        writes = isinstance(file, (str, os.PathLike)) and any(c in mode for c in "wax")
        if writes and "/checkpoints/" in os.fspath(file) and os.path.exists(MARK):
            file, mode = "/dev/full", mode.replace("x", "w")
        return real(file, mode, *args, **arguments)

    builtins.open = io.open = full


def hang_disk():
    """While the mark exists, what writes below `checkpoints` waits, as on a network disk whose
    server does not answer."""

    def waiting(real, writes=lambda path, *args, **arguments: True):
        def call(path, *args, **arguments):
            named = isinstance(path, (str, os.PathLike))
            if named and "/checkpoints/" in os.fspath(path) and writes(path, *args, **arguments):
                while os.path.exists(MARK):
                    time.sleep(0.1)
            return real(path, *args, **arguments)

        return call

    def opens(path, mode="r", *args, **arguments):
        return any(c in mode for c in "wax")

    builtins.open = io.open = waiting(io.open, opens)
    for name in ("mkdir", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, waiting(getattr(os, name)))


TARGETS = {
    "killed_in_backward": ("rlcore.learner.engines.deepspeed", killed_in_backward),
    "killed_at_commit": ("rlcore.cluster.clients.buffer", killed_at_commit),
    "lost_tensor": ("rlcore.rollout.engines.vllm.worker_extension", lost_tensor),
    "nan_loss": ("rlcore.learner.update", nan_loss),
    "slow_actor": ("rlcore.rollout.engines.vllm.engine", slow_actor),
}
CHANGES = dict([TARGETS[FAULT]] if FAULT in TARGETS else [])  # module -> what is changed in it
if FAULT == "talking_roles":
    roles = ("buffer", "learner", "rollout", "scorer")
    CHANGES |= {f"rlcore.cluster.actors.{role}": talking_roles for role in roles}
if TRAINED:
    CHANGES["rlcore.learner.rank"] = record


class Hook(importlib.abc.MetaPathFinder):
    """Applies a change to a module right after it was executed."""

    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Hook())
if FAULT == "disk_full":
    fill_disk()
elif FAULT == "hung_disk":
    hang_disk()
elif FAULT == "clock_jump":
    real = time.time

    def jumped():
        """The wall clock of every Python process, by the seconds that the mark holds."""
        try:
            with open(MARK) as file:
                return real() + float(file.read() or 0)
        except FileNotFoundError:
            return real()

    time.time = jumped
