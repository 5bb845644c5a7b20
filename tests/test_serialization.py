"""Records and scores to bytes and back: exact, without pickle, and never from malformed bytes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors import safe_open
from safetensors.numpy import load, save

from rlcore.serialization import (
    StoredEpisode,
    StoredGroup,
    dump_scores,
    dump_trajectory,
    load_group,
    load_scores,
    load_trajectory,
    read_header,
    record_bytes,
)
from rlcore.testing.records import make_score, make_trajectory
from rlcore.types import Score, Trajectory

int32 = st.integers(-(2**31), 2**31 - 1)
numbers = st.dictionaries(st.text(max_size=5), st.floats(), max_size=3)
ARRAYS = (
    "token_ids",
    "sampled",
    "logp_inf",
    "topk_ids",
    "topk_logp",
    "token_version",
    "turn_starts",
)
EXTRA_DTYPES = [np.bool_, np.uint8, np.int64, np.float16, np.float32, np.float64]


@st.composite
def masks(draw):
    """(sampled, turn_starts) of several turns, each an observation and then sampled tokens."""
    turns = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3))
    sampled, starts = [False], []
    for observed, drawn in turns:
        sampled += [False] * observed
        starts.append(len(sampled))
        sampled += [True] * drawn
    return np.array(sampled, bool), np.array(starts, np.int32)


@st.composite
def trajectories(draw):
    sampled, starts = draw(masks())
    length, count, k = len(sampled), int(sampled.sum()), draw(st.integers(0, 3))
    floats = st.floats(width=32)
    parts = draw(st.integers(1, 3))
    extras = {
        draw(st.text(max_size=4)): draw(arrays(dtype, (count, 2)))
        for dtype in draw(st.lists(st.sampled_from(EXTRA_DTYPES), max_size=2))
    }
    return Trajectory(
        token_ids=draw(arrays(np.int32, length, elements=int32)),
        sampled=sampled,
        logp_inf=draw(arrays(np.float32, count, elements=floats)),
        topk_ids=draw(arrays(np.int32, (count, k), elements=int32)),
        topk_logp=draw(arrays(np.float32, (count, k), elements=floats)),
        token_version=draw(arrays(np.int32, count, elements=int32)),
        turn_starts=starts,
        actor_id=draw(st.text(max_size=5)),
        actor_kind=draw(st.sampled_from(["bf16", "fp8", "sparse", "draft"])),
        group_id=draw(st.integers(-(2**63), 2**63)),
        prompt_id=draw(st.text(max_size=8)),
        sample_index=draw(st.integers(0, 10)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        draw_id=draw(st.text(max_size=8)),
        part=draw(st.integers(0, parts - 1)),
        parts=parts,
        purpose=draw(st.sampled_from(["train", "eval/3/digits/greedy"])),
        timings=draw(numbers),
        extras=extras,
    )


@st.composite
def all_scores(draw):
    status = draw(st.sampled_from(["ok", "error", "timeout"]))
    return Score(
        group_id=draw(st.integers(-5, 2**63)),
        sample_index=draw(st.integers(0, 10)),
        draw_id=draw(st.text(max_size=8)),
        status=status,
        reward=draw(st.floats()) if status == "ok" else None,
        parts=draw(numbers),
        turn_rewards=tuple(draw(st.lists(st.floats(), max_size=3))),
        token_rewards=tuple(draw(st.lists(st.floats(), max_size=3))),
        error=draw(st.text(max_size=20)),
        seconds=draw(st.floats()),
    )


def bits(array):
    return array.dtype.str, array.shape, array.tobytes()


def plain(t):
    """Everything of a trajectory in a form whose == is equality to the bit, NaN included."""
    names = [n for n in t.__dataclass_fields__ if n not in (*ARRAYS, "extras")]
    return (
        repr([(n, getattr(t, n)) for n in names]),
        {n: bits(getattr(t, n)) for n in ARRAYS},
        {n: bits(a) for n, a in t.extras.items()},
    )


def sample(**changes):
    """Two model turns with an observation between them."""
    t = make_trajectory(7, 1, turns=(((3, 4), (5,)), ((8, 8, 8), (6,))), version=(4, 5))
    t = replace(
        t,
        logp_inf=np.array([-0.1, -2.5], np.float32),
        topk_logp=np.array([[-0.1, -3.3], [-2.5, -np.inf]], np.float32),
    )
    return replace(t, **changes)


@settings(max_examples=100, deadline=None)
@given(trajectories())
def test_a_record_with_observations_and_parts_round_trips_to_the_bit(t):
    data = dump_trajectory(t)
    assert plain(load_trajectory(data)) == plain(t)
    header = read_header(data)
    for name in ("group_id", "sample_index", "prompt_id", "draw_id", "part", "parts", "purpose",
                 "actor_id", "actor_kind", "finish_reason", "request_id"):  # fmt: skip
        assert getattr(header, name) == getattr(t, name)
    assert (header.tokens, header.length) == (len(t.logp_inf), len(t.token_ids))
    versions = t.token_version.tolist()
    assert header.oldest_version == min(versions, default=None)
    assert header.newest_version == max(versions, default=None)


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_any_safetensors_reader_reads_a_record(t):
    data = dump_trajectory(t)
    read = load(data)
    assert {n: bits(a) for n, a in read.items() if not n.startswith("extra.")} == plain(t)[1]
    assert {n[6:]: bits(a) for n, a in read.items() if n.startswith("extra.")} == plain(t)[2]


def test_a_records_fields_are_metadata_of_the_file(tmp_path):
    (tmp_path / "record.safetensors").write_bytes(dump_trajectory(sample()))
    with safe_open(tmp_path / "record.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert metadata["prompt_id"] == "digits/train/7" and metadata["versions"] == "4,5"


@settings(max_examples=60, deadline=None)
@given(st.lists(all_scores(), max_size=3))
def test_scores_round_trip_exactly(scores):
    assert repr(load_scores(dump_scores(scores))) == repr(scores)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "rlcore.scores", "version": 2}',
        dump_scores([make_score(sample())]).replace('"status":"ok"', '"status":"fine"'),
        dump_scores([make_score(sample())]).replace('"reward":1.0', '"reward":null'),
        dump_scores([make_score(sample())]).replace('"group_id":7', '"group_id":"7"'),
    ],
)
def test_malformed_scores_are_refused(text):
    with pytest.raises(ValueError, match=r"malformed rlcore\.scores data"):
        load_scores(text)


def test_a_stored_group_becomes_the_group_that_the_learner_trains_on():
    records = [sample(sample_index=i) for i in range(2)]
    second = [replace(sample(sample_index=2), part=p, parts=2) for p in range(2)]
    episodes = [
        StoredEpisode(make_score(r, float(i)), (dump_trajectory(r),)) for i, r in enumerate(records)
    ]
    episodes.append(
        StoredEpisode(make_score(second[0], 0.5), tuple(dump_trajectory(r) for r in second))
    )
    group = load_group(StoredGroup(7, "digits/train/7", 4, 6, tuple(episodes)))
    assert (group.group_id, group.prompt_id) == (7, "digits/train/7")
    assert (group.admitted_version, group.arrival_version, group.tokens) == (4, 6, 8)
    assert [e.score.reward for e in group.episodes] == [0.0, 1.0, 0.5]
    assert [[t.part for t in e.parts] for e in group.episodes] == [[0], [0], [0, 1]]
    assert plain(group.episodes[1].parts[0]) == plain(records[1])


def test_topk_stored_as_float16_halves_it_and_comes_back_as_float32():
    t = sample()
    data = dump_trajectory(t, topk_dtype="float16")
    assert load(data)["topk_logp"].dtype == np.float16
    back = load_trajectory(data)
    np.testing.assert_array_equal(back.topk_logp, t.topk_logp.astype(np.float16).astype(np.float32))
    assert back.topk_logp.dtype == np.float32
    # the sampled log-prob is never rounded
    np.testing.assert_array_equal(back.logp_inf, t.logp_inf)
    below = replace(t, topk_logp=np.full((2, 2), -1e5, np.float32))
    assert np.isneginf(
        load_trajectory(dump_trajectory(below, topk_dtype="float16")).topk_logp
    ).all()


def test_the_estimate_of_a_records_size_is_close():
    for observed, drawn, k in ((10, 10, 20), (300, 700, 20), (5, 2000, 0)):
        t = make_trajectory(turns=((range(observed), range(drawn)),), k=k)
        for dtype in ("float32", "float16"):
            size = len(dump_trajectory(t, dtype))
            assert size <= record_bytes(observed + drawn, drawn, k, dtype) <= size + 600


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_still_a_trajectory(data):
    """Any damage ends as ValueError, or hit a value that may be anything; never another
    exception."""
    blob = bytearray(dump_trajectory(sample(extras={"routes": np.zeros((2, 3), np.int8)})))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(
        blob[: data.draw(st.sampled_from([len(blob), len(blob) - 1, len(blob) // 2, 9, 3, 0]))]
    )
    for read in (load_trajectory, read_header):
        try:
            read(damaged)
        except ValueError as error:
            assert "rlcore.trajectories data" in str(error)


def edited(data=None, **metadata):
    """A dump whose metadata was rewritten, the arrays untouched."""
    blob = dump_trajectory(sample()) if data is None else data
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    header["__metadata__"] |= metadata
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + blob[8 + size :]


def pieces(drop=None, **more):
    """A record written by the safetensors library, with arrays taken out or put in."""
    size = int.from_bytes(dump_trajectory(sample())[:8], "little")
    header = json.loads(dump_trajectory(sample())[8 : 8 + size])
    kept = {n: a for n, a in load(dump_trajectory(sample())).items() if n != drop}
    return save(kept | more, header["__metadata__"])


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "truncated"),
        (b"\x80\x04pickle..", "truncated"),
        (edited(format="other"), "format is 'other', expected 'rlcore.trajectories'"),
        (edited(finish_reason="tired"), "finish_reason='tired' is not a value of that field"),
        (edited(part="2"), "part 2 of 1"),
        (edited(group_id="x"), "invalid literal"),
        (pieces(drop="sampled"), "KeyError: 'sampled'"),
        (pieces(routes=np.zeros(3, np.int32)), "there is no array of the name routes"),
        (pieces(logp_inf=np.zeros(2, np.float64)), "logp_inf is of float64"),
        (pieces(logp_inf=np.zeros(3, np.float32)), "disagree on 2 sampled tokens"),
        (dump_trajectory(sample())[:-4], "bytes, its header describes"),
        (dump_trajectory(sample()) + b"more", "bytes, its header describes"),
    ],
)
def test_malformed_bytes_say_what_is_wrong(blob, message):
    with pytest.raises(ValueError, match=r"malformed rlcore\.trajectories data") as caught:
        load_trajectory(blob)
    assert message in str(caught.value)


@pytest.mark.parametrize("read", [load_trajectory, read_header])
def test_the_first_version_is_refused_in_a_sentence(read):
    with pytest.raises(ValueError, match=r"data of version '1' cannot be read: .* reads version 2"):
        read(edited(version="1"))


def test_a_header_is_not_read_from_half_a_record():
    with pytest.raises(ValueError, match="its header describes"):
        read_header(dump_trajectory(sample())[:-4])


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.arange(7)},
        {"topk_logp": np.zeros((2, 3), np.float32)},
        {"logp_inf": np.zeros(2, np.float64)},
        {"sampled": np.array([0, 0, 1, 0, 0, 0, 1])},
    ],
)
def test_arrays_of_another_type_are_not_written(change):
    with pytest.raises(ValueError, match=f"trajectory train:7:1: {next(iter(change))} must be"):
        dump_trajectory(sample(**change))


def test_extra_arrays_of_other_types_are_not_written():
    with pytest.raises(ValueError, match="extra array routes must be of: bool"):
        dump_trajectory(sample(extras={"routes": np.array(["a"])}))
