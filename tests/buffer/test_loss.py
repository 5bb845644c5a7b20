"""Records in shards: the buffer accounts for them as for its own, and a shard that is lost costs
what only it had, which is sampled again under the same group."""

import pytest
from buffer_helpers import deliver, fill, ids_of, load, make_buffer, sample
from hypothesis import given
from hypothesis import strategies as st

from rlcore.buffer import journal, store
from rlcore.buffer.journal import (
    JournalError,
    RecordFile,
    dealt,
    file_of,
    read_record_file,
    write_record_file,
)
from rlcore.buffer.shard import Shard, ShardReport, with_records
from rlcore.buffer.store import lose_shard
from rlcore.references import RecordReference, ShardLost

PROMPTS = [f"digits/train/{i}" for i in range(8)]


class Nodes:
    """A buffer and two shards."""

    def __init__(self, **settings):
        self.buffer = make_buffer(**settings)
        self.shards = {name: Shard(name) for name in ("one", "two")}

    def deliver(self, name, *samples):
        kept = self.shards[name].put([record for record, _ in samples])
        self.buffer.add_report(ShardReport(kept, [score for _, score in samples]))

    def fill(self, name, group_id, rewards=(0.0, 1.0), **fields):
        fields = {"prompt_id": PROMPTS[group_id], **fields}
        self.deliver(
            name, *(sample(group_id, i, reward=r, **fields) for i, r in enumerate(rewards))
        )

    def fetch(self, keys):
        for name in keys:
            if name not in self.shards:
                raise ShardLost(name)
        return {name: self.shards[name].get(its) for name, its in keys.items()}

    def write(self, folder, keys):
        read = self.fetch(keys)
        return {s: write_record_file(folder / file_of(s), read[s]) for s in keys}

    def read(self, folder, files):
        return {
            s: [self.shards[s].keep(read_record_file(folder, f)) for f in files[s]] for s in files
        }

    def lose(self, name, written=None):
        del self.shards[name]
        recover = (lambda *key: None) if written is None else written.read
        return lose_shard(self.buffer, name, recover)

    def drop_released(self):
        for name, shard in self.shards.items():
            shard.drop(self.buffer.live.take_released(name))

    def kept(self):
        return [shard.bytes for shard in self.shards.values()]


def test_a_batch_is_the_same_whether_its_records_are_here_or_there():
    there, here = Nodes(groups_per_step=2), make_buffer(groups_per_step=2)
    for buffer in (there.buffer, here):
        assert buffer.admit(PROMPTS[:2]) == [0, 1]
    for group in (0, 1):
        there.fill(("one", "two")[group], group)
        fill(here, [group], 2, prompt_id=PROMPTS[group])
    for buffer in (there.buffer, here):
        buffer.take(0)
    stored = there.buffer.stored(0, [0, 1])
    assert all(
        isinstance(r, RecordReference) for g in stored for e in g.episodes for r in e.records
    )
    assert with_records(stored, there.fetch) == here.stored(0, [0, 1])
    of_both = [store.metrics(buffer) for buffer in (there.buffer, here)]
    for found in of_both:
        assert found.pop("time/score_lag_s") >= 0.0
    assert of_both[0] == of_both[1]


def test_a_shard_keeps_what_may_still_be_read_and_no_more():
    nodes = Nodes(groups_per_step=1, train_on_best=1)
    nodes.buffer.admit(PROMPTS[:1])
    nodes.fill("one", 0)
    nodes.drop_released()
    assert nodes.kept() == [nodes.buffer.live.bytes, 0]  # the better sample alone
    late = sample(0, 0, prompt_id=PROMPTS[0], draw_id="again")
    nodes.deliver("two", late)  # it was drawn twice
    nodes.drop_released()
    assert nodes.kept()[1] == 0
    nodes.buffer.take(0)
    nodes.buffer.commit(0)
    nodes.drop_released()
    nodes.deliver("two", late)
    nodes.drop_released()
    assert nodes.kept() == [0, 0]


def test_what_a_lost_shard_had_is_sampled_again_under_the_same_account():
    nodes = Nodes(groups_per_step=2, max_staleness=1)
    buffer = nodes.buffer
    assert buffer.admit(PROMPTS[:4]) == [0, 1, 2, 3]
    nodes.fill("one", 0)
    nodes.fill("two", 1)
    nodes.deliver("one", sample(2, 1, prompt_id=PROMPTS[2]))
    record, _ = sample(3, 0, prompt_id=PROMPTS[3])
    buffer.add_report(ShardReport(nodes.shards["one"].put([record])))  # its score has not come
    buffer.take(0)
    again = nodes.lose("one")
    missing = {0: (0, 1), 2: (0, 1), 3: (0, 1)}
    assert again == {g: (PROMPTS[g], samples) for g, samples in missing.items()}
    assert not buffer.whole(0, [0, 1]) and buffer.whole(0, [1])
    counts = store.metrics(buffer)
    assert (counts["buffer/resampled"], counts["buffer/in_flight"]) == (3, 3)
    assert (counts["ledger/live"], counts["ledger/evicted"], counts["ledger/failed"]) == (4, 0, 0)
    for group in (0, 2, 3):
        nodes.fill("two", group, draw_id="again")
    assert buffer.whole(0, [0, 1])
    assert [g.group_id for g in with_records(buffer.stored(0, [0, 1]), nodes.fetch)] == [0, 1]
    buffer.commit(0)
    buffer.set_versions(0, 1)
    assert ids_of(buffer.take(1)) == [2, 3]
    buffer.commit(1)
    counts = store.metrics(buffer)
    assert counts["ledger/consumed"] == counts["ledger/admitted"] == 4


def test_a_batch_that_is_trained_on_meanwhile_is_consumed_once():
    """Its ranks had fetched it: the new samples come too late."""
    nodes = Nodes(groups_per_step=1)
    nodes.buffer.admit(PROMPTS[:1])
    nodes.fill("one", 0)
    nodes.buffer.live.take_landed()
    nodes.buffer.take(0)
    nodes.lose("one")
    nodes.buffer.commit(0)
    assert nodes.buffer.live.take_landed() == [0]
    nodes.fill("two", 0, draw_id="again")
    nodes.drop_released()
    counts = store.metrics(nodes.buffer)
    assert counts["ledger/consumed"] == 1 and counts["buffer/late"] == 2
    assert nodes.kept() == [0]


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (1.0, None)])
def test_a_group_that_a_batch_has_stays_whatever_its_new_samples_are(rewards):
    nodes = Nodes(groups_per_step=1, dynamic_sampling=True)
    nodes.buffer.admit(PROMPTS[:1])
    nodes.fill("one", 0)
    nodes.buffer.take(0)
    nodes.lose("one")
    for i, reward in enumerate(rewards):
        status = "ok" if reward is not None else "error"
        fields = {"prompt_id": PROMPTS[0], "draw_id": "again"}
        nodes.deliver("two", sample(0, i, reward=reward, status=status, **fields))
    (group,) = nodes.buffer.stored(0, [0])
    assert len(group.episodes) == sum(r is not None for r in rewards)
    nodes.buffer.commit(0)
    assert store.metrics(nodes.buffer)["ledger/consumed"] == 1


def test_a_batch_that_was_put_back_waits_for_what_is_sampled_again():
    nodes = Nodes(groups_per_step=1)
    nodes.buffer.admit(PROMPTS[:1])
    nodes.fill("one", 0)
    nodes.buffer.take(0)
    nodes.buffer.rollback(0)
    nodes.lose("one")
    assert not nodes.buffer.ready(0)
    nodes.fill("two", 0, draw_id="again")
    assert ids_of(nodes.buffer.take(0)) == [0]


def test_a_lost_shard_is_not_listened_to():
    nodes = Nodes(groups_per_step=1)
    nodes.buffer.admit(PROMPTS[:1])
    kept = nodes.shards["one"].put([sample(0, 0, prompt_id=PROMPTS[0])[0]])
    nodes.lose("one")
    nodes.buffer.add_report(ShardReport(kept))
    assert nodes.buffer.live.bytes == 0


def test_a_checkpoint_holds_what_shards_keep_and_gives_it_back(tmp_path):
    nodes = Nodes(groups_per_step=2, max_staleness=1)
    nodes.buffer.admit(PROMPTS[:3])
    nodes.fill("one", 0)
    nodes.fill("two", 1)
    nodes.buffer.take(0)
    before = with_records(nodes.buffer.stored(0, [0, 1]), nodes.fetch)
    cut = journal.cut(nodes.buffer)
    written = journal.save(tmp_path / "buffer", cut, nodes.write)
    names = {path.name for path in (tmp_path / "buffer").iterdir()}
    assert {"records-one.bin", "records-two.bin"} < names
    assert not (tmp_path / "buffer" / "records.bin").stat().st_size
    (tmp_path / "buffer").rename(tmp_path / "sealed")
    nodes.fill("one", 2)
    assert list(nodes.lose("one", written)) == [2]  # what came after the checkpoint
    assert with_records(nodes.buffer.stored(0, [0, 1]), nodes.fetch) == before
    resumed = make_buffer(groups_per_step=2, max_staleness=1)
    load(tmp_path / "sealed", resumed)
    resumed.take(0)
    assert resumed.stored(0, [0, 1]) == before  # all of it, without any shard
    written.close()


def test_a_checkpoint_fails_if_a_shard_is_lost_while_it_is_written(tmp_path):
    nodes = Nodes(groups_per_step=1)
    nodes.buffer.admit(PROMPTS[:1])
    nodes.fill("one", 0)
    cut = journal.cut(nodes.buffer)
    nodes.lose("one")
    with pytest.raises(ShardLost):
        journal.save(tmp_path / "buffer", cut, nodes.write)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_a_lost_batch_takes_it_again_when_it_is_whole(tmp_path):
    nodes = Nodes(groups_per_step=1, dynamic_sampling=True)
    nodes.buffer.admit(PROMPTS[:1])
    nodes.fill("one", 0)
    nodes.buffer.take(0)
    nodes.lose("one")
    journal.save(tmp_path / "buffer", journal.cut(nodes.buffer), nodes.write).close()
    resumed = make_buffer(groups_per_step=1, dynamic_sampling=True)
    load(tmp_path / "buffer", resumed)
    assert list(resumed.in_flight()) == [0] and not resumed.ready(0)
    deliver(resumed, *(sample(0, i, prompt_id=PROMPTS[0], reward=1.0) for i in range(2)))
    assert ids_of(resumed.take(0)) == [0]


def saved(folder, **settings):
    """A journal with two groups in each of two shards and one in the buffer's own process, and the
    records of the batch of step 0."""
    nodes = Nodes(groups_per_step=5, **settings)
    nodes.buffer.admit(PROMPTS[:5])
    for name, group in (("one", 0), ("one", 1), ("two", 2), ("two", 3)):
        nodes.fill(name, group)
    fill(nodes.buffer, [4], 2, prompt_id=PROMPTS[4])
    journal.save(folder, journal.cut(nodes.buffer), nodes.write).close()
    nodes.buffer.take(0)
    return with_records(nodes.buffer.stored(0, range(5)), nodes.fetch)


def resumed_from(folder, nodes):
    loaded = journal.read(folder, list(nodes.shards), nodes.read)
    journal.restore(nodes.buffer, loaded.snapshot)
    return loaded


@pytest.mark.parametrize("names", [("three",), ("three", "four"), ("three", "four", "five")])
def test_a_resume_has_the_shards_of_now_read_what_shards_wrote(tmp_path, names):
    before = saved(tmp_path / "buffer")
    nodes = Nodes(groups_per_step=5)
    nodes.shards = {name: Shard(name) for name in names}
    loaded = resumed_from(tmp_path / "buffer", nodes)
    own = [r for r in loaded.snapshot.records if isinstance(r, bytes)]
    assert len(own) == 2, "the records of the process itself"
    assert sum(nodes.kept()) + sum(map(len, own)) == nodes.buffer.live.bytes
    assert [kept > 0 for kept in nodes.kept()] == [i < 2 for i in range(len(names))]
    nodes.buffer.take(0)
    assert with_records(nodes.buffer.stored(0, range(5)), nodes.fetch) == before
    nodes.buffer.commit(0)
    nodes.drop_released()
    assert not any(nodes.kept()) and nodes.buffer.live.bytes == 0
    loaded.written.close()


def test_what_a_shard_has_read_is_read_again_from_the_checkpoint_when_it_is_lost(tmp_path):
    before = saved(tmp_path / "buffer")
    nodes = Nodes(groups_per_step=5)
    loaded = resumed_from(tmp_path / "buffer", nodes)
    nodes.buffer.take(0)
    assert nodes.lose("two", loaded.written) == {}
    assert with_records(nodes.buffer.stored(0, range(5)), nodes.fetch) == before
    loaded.written.close()


def test_a_resume_without_shards_has_all_records_in_its_process(tmp_path):
    before = saved(tmp_path / "buffer")
    resumed = make_buffer(groups_per_step=5)
    load(tmp_path / "buffer", resumed)
    resumed.take(0)
    assert resumed.stored(0, range(5)) == before


def test_a_resume_with_fewer_samples_drops_the_others_in_their_shard(tmp_path):
    stopped = Nodes(samples_per_group=3)
    stopped.buffer.admit(PROMPTS[:1])
    stopped.fill("one", 0)  # two of three
    journal.save(tmp_path / "buffer", journal.cut(stopped.buffer), stopped.write).close()
    nodes = Nodes(samples_per_group=1)
    resumed_from(tmp_path / "buffer", nodes).written.close()
    nodes.drop_released()
    assert sum(nodes.kept()) == nodes.buffer.live.bytes == sum(stopped.kept()) // 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "append", "remove"])
def test_damage_of_what_a_shard_wrote_is_found_where_it_is_read(tmp_path, damage):
    saved(tmp_path / "buffer")
    path = tmp_path / "buffer" / file_of("two")
    data = path.read_bytes()
    changed = {
        "truncate": data[:-1],
        "flip": bytes([data[0] ^ 1]) + data[1:],
        "append": data + b"0",
    }
    path.unlink() if damage == "remove" else path.write_bytes(changed[damage])
    nodes = Nodes(groups_per_step=5)
    with pytest.raises(JournalError, match=path.name):
        resumed_from(tmp_path / "buffer", nodes)
    assert nodes.buffer.ledger.admitted == 0


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 6))
def test_files_are_dealt_once_and_evenly(sizes, count):
    files = [RecordFile(str(i), [size], "") for i, size in enumerate(sizes)]
    shards = [f"shard-{i}" for i in range(count)]
    given_to = dealt(files, shards)
    assert sorted(f.name for its in given_to.values() for f in its) == sorted(f.name for f in files)
    loads = [sum(f.size for f in given_to.get(shard, [])) for shard in shards]
    assert max(loads) - min(loads) <= max(sizes, default=0)
