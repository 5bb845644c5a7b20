"""A learner's checkpoint on a disk that hangs: the rank computes on, and the disk is reported."""

import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from timing import deadline, wait_until

from rlcore.cluster.actors.learner import LearnerActor, WriteBehind
from rlcore.cluster.specs import Hosting, RaySpec
from rlcore.errors import DeadlineExceeded
from rlcore.files import replace_file
from rlcore.learner.state_files import Part, StateWriter, open_state, read_index
from rlcore.loop.specs import EvaluationSpec, ScheduleSpec, SupervisionSpec
from rlcore.weights.specs import TransportSpec


class Rank:
    """Rank 0 of a learner with one tensor, on a disk that hangs while `hung` is set."""

    rank = 0

    def __init__(self):
        self.free = threading.Event()

    def hang(self):
        assert self.free.wait(deadline(60))

    def save(self, folder, run):
        run(self.hang)
        writer = StateWriter(folder, run)
        writer.add("weight:w", Part.whole(torch.arange(6.0).reshape(3, 2)))
        writer.close([writer.finish()], optimizer_steps=3)


@pytest.fixture
def learner():
    specs = (RaySpec(), ScheduleSpec(), SupervisionSpec(), TransportSpec(), EvaluationSpec())
    actor = LearnerActor(None, Hosting(*specs, run_dir="", own_nodes=False))
    actor.rank = Rank()
    yield actor
    actor.rank.free.set()


def test_a_hung_disk_costs_its_checkpoint_and_not_the_rank(learner, tmp_path):
    learner.save(tmp_path / "a", False)  # returns, though not even the folder can be made
    assert not (tmp_path / "a").exists()
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s.*checkpoint\.write_timeout_s=0\.1"):
        learner.saved(0.1)
    learner.save(tmp_path / "b", False)  # holds no second copy of the state for that disk
    with pytest.raises(DeadlineExceeded, match="has not ended what it was asked for"):
        learner.saved(deadline(5))
    hung = learner._writing[0]
    learner.rank.free.set()
    wait_until(lambda: not hung.running, 30, "the disk to end")
    assert not (tmp_path / "a").exists()  # what had not begun is dropped

    learner.save(tmp_path / "c", False)
    learner.saved(deadline(10))
    assert read_index(tmp_path / "c")["optimizer_steps"] == 3
    with open_state(tmp_path / "c") as state:
        assert {n: t.whole().tolist() for n, t in state.items()} == {
            "weight:w": [[0, 1], [2, 3], [4, 5]]
        }


@pytest.mark.parametrize("on_device", [True, False])
def test_a_group_s_publication_is_announced_from_weights_where_they_are_sent_from(
    learner, on_device
):
    """A checksum of weights on a GPU needs no copy of all of them on the host."""
    asked = []

    def published_weights(name, dtype, only=None, *, on_device=False):
        asked.append(on_device)
        return iter([("w", torch.ones(2))])

    learner._joined, learner._run_seed = True, 0
    learner.group = SimpleNamespace(on_device=on_device)
    learner.rank.published_weights = published_weights
    learner.rank.published_shapes = lambda name: {"w": (2,)}
    manifest, handle = learner.publish(1, "policy", "float32", True, None)
    assert asked == [on_device] and handle is None and set(manifest.checksums) == {"w"}


def test_the_first_error_is_raised_and_what_follows_it_is_dropped(tmp_path):
    done = []

    def fail():
        raise OSError("No space left on device")

    behind = WriteBehind()
    for job in (lambda: done.append(1), fail, lambda: done.append(3)):
        behind.put(job)
    behind.close()
    with pytest.raises(OSError, match="No space left"):
        behind.wait(deadline(10))
    assert done == [1] and not behind.running


def test_jobs_are_done_in_order(tmp_path):
    behind = WriteBehind()
    for i in range(50):
        behind.put(partial(replace_file, tmp_path / "last", str(i)))
    behind.close()
    behind.wait(deadline(10))
    assert (tmp_path / "last").read_text() == "49"


@pytest.mark.processes
def test_a_hung_write_does_not_keep_the_process_from_ending():
    code = (
        "import time\nfrom rlcore.cluster.actors.learner import WriteBehind\n"
        "from threading import Event\nbegun, behind = Event(), WriteBehind()\n"
        "behind.put(lambda: begun.set() or time.sleep(10**6))\nbegun.wait()"
    )
    subprocess.run([sys.executable, "-c", code], timeout=deadline(60), check=True)
