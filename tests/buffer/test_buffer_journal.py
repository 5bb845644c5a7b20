"""The buffer on disk: whole or not at all, and the continued run equals the uninterrupted one."""

import os
import signal

import pytest
from buffer_helpers import (
    PROMPT,
    Run,
    deliver,
    fill,
    give_up,
    ids_of,
    load,
    make_buffer,
    sample,
)

from rlcore.buffer import journal, store


def fresh():
    return make_buffer(2, 2, steps_per_publish=2, max_staleness=1, run_seed=3)


def midway():
    """Finished, partly arrived and untouched groups, one batch taken and not committed, one scoring
    error, a record without its score and a score without its record."""
    buffer = fresh()
    buffer.admit([f"digits/train/{i}" for i in range(6)])
    for g in (0, 1, 3):
        fill(buffer, [g], 2, prompt_id=f"digits/train/{g}")
    deliver(buffer, sample(2, 1, prompt_id="digits/train/2", status="timeout"))
    buffer.add_records([sample(4, 0, prompt_id="digits/train/4")[0]])
    buffer.add_scores([sample(4, 1, prompt_id="digits/train/4")[1]])
    give_up(buffer, 5)
    buffer.take(0)
    return buffer


def reloaded(folder, old, new):
    journal.save(folder, journal.cut(old))
    load(folder, new)
    return new


def test_round_trip_keeps_groups_accounts_and_the_uncommitted_batch(tmp_path):
    old = midway()
    new = reloaded(tmp_path / "buffer", old, fresh())
    unpaired = len(sample(4, 0, prompt_id="digits/train/4")[0])
    expected = store.metrics(old)
    del expected["time/score_lag_s"]  # of samples of this process
    assert store.metrics(new) == expected | {"buffer/bytes": expected["buffer/bytes"] - unpaired}
    assert new.in_flight() == old.in_flight() and list(new.in_flight()) == [2, 4]
    assert new.next_step == 0
    batch = new.take(0)
    assert ids_of(batch) == [0, 1]
    assert new.stored(0, [0, 1]) == old.stored(0, [0, 1])
    again, before = (journal.snapshot(journal.cut(buffer)) for buffer in (new, old))
    assert (again.records, again.scores) == (before.records, before.scores)


def test_an_unpaired_half_is_asked_for_again(tmp_path):
    new = reloaded(tmp_path / "buffer", midway(), fresh())
    assert new.in_flight([4]) == {4: ("digits/train/4", (0, 1))}
    fill(new, [4], 2, prompt_id="digits/train/4")
    assert list(new.in_flight()) == [2]
    store.metrics(new)


def test_a_batch_of_another_size_is_chosen_anew_after_the_stop(tmp_path):
    old = midway()
    fill(old, [4], 2, prompt_id="digits/train/4")
    new = make_buffer(3, 2, steps_per_publish=2, max_staleness=1, run_seed=3)
    reloaded(tmp_path / "buffer", old, new)
    assert ids_of(new.take(0)) == [0, 1, 3]
    store.metrics(new)


@pytest.mark.parametrize(("first", "then"), [(4, 2), (2, 4)])
def test_a_resume_with_another_number_of_samples_finishes_every_group(tmp_path, first, then):
    old = make_buffer(3, first)
    old.admit([PROMPT] * 3)
    deliver(old, sample(0, 0), *(sample(0, i) for i in range(2, first)))
    deliver(old, sample(1, first - 1))
    new = reloaded(tmp_path / "buffer", old, make_buffer(3, then))
    for group, (_, missing) in new.in_flight().items():
        deliver(new, *(sample(group, i) for i in missing))
    assert new.in_flight() == {}
    batch = new.take(0)
    assert ids_of(batch) == [0, 1, 2]
    assert [len(g.episodes) for g in new.stored(0, [0, 1, 2])] == [then] * 3
    store.metrics(new)


def test_an_empty_buffer_round_trips(tmp_path):
    new = reloaded(tmp_path / "buffer", fresh(), fresh())
    assert new.room() == 6 and new.ledger.admitted == 0


class Interrupted(Run):
    """A run that is stopped at random moments: the buffer saved and loaded, what was in flight
    asked for again."""

    def __init__(self, make, folder, *args, **settings):
        super().__init__(make(), *args, **settings)
        self.make, self.folder, self.stops = make, folder, 0

    def finish(self):
        if self.rng.random() < 0.1:
            self.stop()
        if self.flight:  # unless all that was in flight were second copies
            super().finish()

    def learn(self):
        if self.rng.random() < 0.5:
            self.stop()
        super().learn()

    def stop(self):
        folder = self.folder / str(self.stops)
        self.buffer = reloaded(folder, self.buffer, self.make())
        self.take_again()
        self.flight.clear()
        self.halves.clear()
        self.request(None)
        self.stops += 1


@pytest.mark.parametrize("sampling", ["fifo", "uniform", "by_task"])
def test_a_synchronous_run_stopped_at_random_trains_on_the_same_batches(tmp_path, sampling):
    def make():
        return make_buffer(
            2, 3, steps_per_publish=2, dynamic_sampling=True, run_seed=7, sampling=sampling
        )

    whole = Run(make(), 1, steps=8, tasks=("a", "b")).play()
    stopped = Interrupted(make, tmp_path, 2, steps=8, tasks=("a", "b")).play()
    assert stopped.stops > 5
    assert stopped.batches == whole.batches


@pytest.mark.parametrize("seed", range(3))
def test_an_asynchronous_run_stopped_at_random_keeps_the_bound_and_trains_on_nothing_twice(
    tmp_path, seed
):
    def make():
        return make_buffer(2, 2, steps_per_publish=2, max_staleness=3)

    run = Interrupted(make, tmp_path, seed, steps=20).play()
    used = [g for batch in run.batches for g in batch]
    assert run.stops > 5 and len(used) == len(set(used)) == run.buffer.ledger.consumed == 40
    assert not run.buffer.ledger.evicted


@pytest.mark.parametrize("name", [journal.STATE, journal.SCORES, journal.RECORDS])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damage_is_found_before_anything_is_believed(tmp_path, name, damage):
    journal.save(tmp_path / "buffer", journal.cut(midway()))
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
        load(tmp_path / "buffer", new)
    assert new.ledger.admitted == 0


def test_a_journal_is_never_overwritten(tmp_path):
    journal.save(tmp_path / "buffer", journal.cut(fresh()))
    with pytest.raises(FileExistsError, match="already exists"):
        journal.save(tmp_path / "buffer", journal.cut(midway()))


def killed_at(point, folder, cut):
    """Save in a child that is killed just before its `point`-th sync or rename. True if it lived to
    the end."""
    child = os.fork()
    if child == 0:
        calls = iter(range(1000))

        def deadly(real):
            def call(*args):
                if next(calls) == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)

            return call

        for name in ("fsync", "rename", "replace"):
            setattr(os, name, deadly(getattr(os, name)))
        journal.save(folder, cut)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.processes
def test_killed_at_any_point_it_is_whole_or_absent_and_can_be_written_again(tmp_path):
    cut = journal.cut(midway())
    seen = []
    for point in range(50):
        folder = tmp_path / f"buffer-{point}"
        if killed_at(point, folder, cut):
            break
        seen.append(folder.exists())
        if folder.exists():
            load(folder, fresh())
        else:
            with pytest.raises(journal.JournalError):
                load(folder, fresh())
            journal.save(folder, cut)
            load(folder, fresh())
    # each of three files is flushed and renamed; the folder appears with the last rename
    assert len(seen) > 6 and seen == sorted(seen) and seen[-1]


def test_a_journal_of_an_older_version_is_refused_in_a_sentence(tmp_path):
    journal.save(tmp_path / "buffer", journal.cut(fresh()))
    path = tmp_path / "buffer" / journal.STATE
    path.write_text(path.read_text().replace('"version":4', '"version":3'))
    with pytest.raises(journal.JournalError, match="version 3 cannot be read: this program reads"):
        load(tmp_path / "buffer", fresh())


def test_a_snapshot_is_not_changed_by_what_happens_afterwards(tmp_path):
    buffer = midway()
    cut = journal.cut(buffer)
    before = repr(journal.snapshot(cut))
    buffer.commit(0)
    deliver(buffer, sample(2, 0, prompt_id="digits/train/2"))
    assert repr(journal.snapshot(cut)) == before


def test_a_snapshot_has_the_records_that_a_group_drops_afterwards():
    """When it is complete, all but the best sample."""
    buffer = make_buffer(1, 2, train_on_best=1)
    buffer.admit([PROMPT])
    deliver(buffer, sample(0, 0, reward=0.0))
    cut = journal.cut(buffer)
    deliver(buffer, sample(0, 1, reward=1.0))
    assert [len(s.records) for _, s in sorted(buffer.live.entries[0].samples.items())] == [0, 1]
    saved = journal.snapshot(cut)
    assert len(saved.records) == 1
    assert [g["samples"][0]["records"] for g in saved.state["groups"]] == [1]
