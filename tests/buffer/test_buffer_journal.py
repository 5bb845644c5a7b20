"""The buffer on disk: whole or not at all, and the continued run equals the uninterrupted one."""

import os
import signal

import pytest
from buffer_helpers import Run, fill, trajectory

from rlcore.buffer import ReplayBuffer, journal


def fresh():
    return ReplayBuffer(2, 2, steps_per_publish=2, max_staleness=1, run_seed=3)


def midway():
    """Finished, partly arrived and untouched groups, one batch taken and not committed, one scoring error."""
    buffer = fresh()
    buffer.admit([f"digits/train/{i}" for i in range(6)], 0)
    for g in (0, 1, 3):
        fill(buffer, [g], 2, prompt_id=f"digits/train/{g}")
    buffer.add([trajectory(2, 1, prompt_id="digits/train/2", status="timeout")])
    buffer.fail_group(5, "gave_up")
    buffer.take(0)
    return buffer


def test_round_trip_keeps_groups_accounts_and_the_uncommitted_batch(tmp_path):
    old, new = midway(), fresh()
    journal.save(tmp_path / "buffer", old.snapshot())
    journal.load(tmp_path / "buffer", new)
    new.check()
    assert new.metrics() == old.metrics()
    assert new.reissue() == old.reissue() and [m.group_id for m in new.reissue()] == [2, 4]
    assert new.next_step == 0 and [g.group_id for g in new.take(0)] == [0, 1]
    old.rollback(0)
    assert new.snapshot()[0]["groups"][2] == old.snapshot()[0]["groups"][2]
    assert old.snapshot()[1] == new.snapshot()[1]


def test_a_batch_of_another_size_is_chosen_anew_after_the_stop(tmp_path):
    old = midway()
    fill(old, [4], 2, prompt_id="digits/train/4")
    journal.save(tmp_path / "buffer", old.snapshot())
    new = ReplayBuffer(3, 2, steps_per_publish=2, max_staleness=1, run_seed=3)
    journal.load(tmp_path / "buffer", new)
    assert [g.group_id for g in new.take(0)] == [0, 1, 3]
    new.check()


def test_an_empty_buffer_round_trips(tmp_path):
    journal.save(tmp_path / "buffer", fresh().snapshot())
    new = fresh()
    journal.load(tmp_path / "buffer", new)
    assert new.room(0) == 6 and new.ledger.admitted == 0


class Interrupted(Run):
    """A run that is stopped at random moments: the buffer saved and loaded, what was in flight asked for again."""

    def __init__(self, make, folder, *args, **settings):
        super().__init__(make(), *args, **settings)
        self.make, self.folder, self.stops = make, folder, 0

    def finish(self):
        if self.rng.random() < 0.1:
            self.stop()
        super().finish()

    def learn(self):
        if self.rng.random() < 0.5:
            self.stop()
        super().learn()

    def stop(self):
        journal.save(self.folder / str(self.stops), self.buffer.snapshot())
        self.buffer = self.make()
        journal.load(self.folder / str(self.stops), self.buffer)
        self.take_again()
        self.flight.clear()
        self.request(None)
        self.stops += 1


@pytest.mark.parametrize("sampling", ["fifo", "uniform", "by_task"])
def test_a_synchronous_run_stopped_at_random_trains_on_the_same_batches(tmp_path, sampling):
    def make():
        return ReplayBuffer(2, 3, steps_per_publish=2, filter_equal=True, run_seed=7, sampling=sampling)

    whole = Run(make(), 1, steps=8, tasks=("a", "b")).play()
    stopped = Interrupted(make, tmp_path, 2, steps=8, tasks=("a", "b")).play()
    assert stopped.stops > 5
    assert stopped.batches == whole.batches


@pytest.mark.parametrize("seed", range(3))
def test_an_asynchronous_run_stopped_at_random_keeps_the_bound_and_trains_on_nothing_twice(tmp_path, seed):
    def make():
        return ReplayBuffer(2, 2, steps_per_publish=2, max_staleness=3)

    run = Interrupted(make, tmp_path, seed, steps=20).play()
    used = [g for batch in run.batches for g in batch]
    assert run.stops > 5 and len(used) == len(set(used)) == run.buffer.ledger.consumed == 40
    assert not run.buffer.ledger.evicted


@pytest.mark.parametrize("name", [journal.STATE, journal.PAYLOADS])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damage_is_found_before_anything_is_believed(tmp_path, name, damage):
    journal.save(tmp_path / "buffer", midway().snapshot())
    path = tmp_path / "buffer" / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    new = fresh()
    with pytest.raises(journal.JournalError, match=str(tmp_path)):
        journal.load(tmp_path / "buffer", new)
    assert new.ledger.admitted == 0


def test_a_journal_is_never_overwritten(tmp_path):
    journal.save(tmp_path / "buffer", fresh().snapshot())
    with pytest.raises(FileExistsError, match="already holds"):
        journal.save(tmp_path / "buffer", midway().snapshot())


def killed_at(point, folder, snapshot):
    """Save in a child that is killed just before its `point`-th sync or rename. True if it lived to the end."""
    child = os.fork()
    if child == 0:
        calls = iter(range(1000))

        def deadly(real):
            def call(*args):
                if next(calls) == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)

            return call

        os.fsync, os.rename = deadly(os.fsync), deadly(os.rename)
        journal.save(folder, snapshot)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_killed_at_any_point_it_is_whole_or_absent_and_can_be_written_again(tmp_path):
    snapshot = midway().snapshot()
    seen = []
    for point in range(10):
        folder = tmp_path / f"buffer-{point}"
        if killed_at(point, folder, snapshot):
            break
        seen.append(folder.exists())
        if folder.exists():
            journal.load(folder, fresh())
        else:
            with pytest.raises(journal.JournalError):
                journal.load(folder, fresh())
            journal.save(folder, snapshot)
            journal.load(folder, fresh())
    assert seen == [False, False, False, False, True]  # two files and their folder synced, renamed, parent synced


def test_a_snapshot_is_not_changed_by_what_happens_afterwards(tmp_path):
    buffer = midway()
    snapshot = buffer.snapshot()
    before = repr(snapshot)
    buffer.commit(0)
    buffer.add([trajectory(2, 0, prompt_id="digits/train/2")])
    assert repr(snapshot) == before
