"""Trajectories and groups to bytes and back: exact, without pickle, and never from malformed bytes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load

from rlcore.serialization import (
    dump_group,
    dump_groups,
    dump_trajectory,
    load_group,
    load_groups,
    load_groups_bytes,
    load_trajectory,
    save_groups,
)
from rlcore.types import Group, Trajectory

int32 = st.integers(-(2**31), 2**31 - 1)
numbers = st.dictionaries(st.text(max_size=5), st.floats(), max_size=3)
ARRAYS = ("prompt_ids", "response_ids", "logp_inf", "topk_ids", "topk_logp", "token_version")


@st.composite
def trajectories(draw):
    t, k = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    status = draw(st.sampled_from(["pending", "ok", "error", "timeout"]))
    floats = st.floats(width=32)
    return Trajectory(
        prompt_ids=draw(arrays(np.int32, st.integers(0, 4), elements=int32)),
        response_ids=draw(arrays(np.int32, t, elements=int32)),
        logp_inf=draw(arrays(np.float32, t, elements=floats)),
        topk_ids=draw(arrays(np.int32, (t, k), elements=int32)),
        topk_logp=draw(arrays(np.float32, (t, k), elements=floats)),
        token_version=draw(arrays(np.int32, t, elements=int32)),
        actor_id=draw(st.text(max_size=5)),
        actor_kind=draw(st.sampled_from(["bf16", "fp8", "sparse", "draft"])),
        group_id=draw(st.integers(-(2**63), 2**63)),
        prompt_id=draw(st.text(max_size=8)),
        sample_index=draw(st.integers(0, 10)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        purpose=draw(st.sampled_from(["train", "eval"])),
        score_status=status,
        reward=draw(st.floats()) if status == "ok" else None,
        reward_parts=draw(numbers),
        score_error=draw(st.text(max_size=20)),
        timings=draw(numbers),
    )


groups = st.builds(
    Group, st.integers(0, 9), st.text(max_size=5), st.integers(0, 9), st.lists(trajectories(), max_size=3),
    st.integers(0, 9),
)  # fmt: skip


def plain(t):
    """Everything of a trajectory in a form whose == is equality to the bit, NaN included."""
    fields = {n: getattr(t, n) for n in t.__dataclass_fields__ if n not in ARRAYS}
    named = {n: (getattr(t, n).dtype.str, getattr(t, n).shape, getattr(t, n).tobytes()) for n in ARRAYS}
    return repr(sorted(fields.items())), named


def plain_group(g):
    return g.group_id, g.prompt_id, g.admitted_version, g.arrival_version, [plain(t) for t in g.trajectories]


def sample(**changes):
    t = Trajectory(
        np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32), np.array([-0.1, -2.5], np.float32),
        np.zeros((2, 2), np.int32), np.array([[-0.1, -3.3], [-2.5, -np.inf]], np.float32), np.array([4, 5], np.int32),
        "actor-0", "bf16", 7, "digits/train/3", 1, "stop", score_status="ok", reward=0.5,
    )  # fmt: skip
    return replace(t, **changes)


@settings(max_examples=80, deadline=None)
@given(trajectories())
def test_trajectory_round_trip_is_exact(t):
    assert plain(load_trajectory(dump_trajectory(t))) == plain(t)


@settings(max_examples=40, deadline=None)
@given(st.lists(groups, max_size=3))
def test_groups_round_trip_is_exact(made):
    assert [plain_group(g) for g in load_groups_bytes(dump_groups(made))] == [plain_group(g) for g in made]
    for g in made:
        assert plain_group(load_group(dump_group(g))) == plain_group(g)


def test_topk_stored_as_float16_halves_it_and_comes_back_as_float32():
    t = sample()
    back = load_trajectory(dump_trajectory(t, topk_dtype="float16"))
    assert load(dump_trajectory(t, topk_dtype="float16"))["topk_logp"].dtype == np.float16
    np.testing.assert_array_equal(back.topk_logp, t.topk_logp.astype(np.float16).astype(np.float32))
    assert back.topk_logp.dtype == np.float32
    np.testing.assert_array_equal(back.logp_inf, t.logp_inf)  # the sampled log-prob is never rounded


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_still_a_trajectory(data):
    """Any damage ends as ValueError, or hit a value that may be anything; never another exception."""
    blob = bytearray(dump_trajectory(sample()))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(blob[: data.draw(st.sampled_from([len(blob), len(blob) - 1, len(blob) // 2, 9, 3, 0]))])
    try:
        assert isinstance(load_trajectory(damaged), Trajectory)
    except ValueError as error:
        assert str(error).startswith("malformed rlcore.trajectories data")


def edited(**metadata):
    """A dump whose metadata was rewritten, the arrays untouched."""
    blob = dump_trajectory(sample())
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    header["__metadata__"] |= metadata
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + blob[8 + size :]


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "truncated"),
        (b"\x80\x04pickle..", "truncated"),
        (edited(format="other"), "format is 'other', expected 'rlcore.trajectories'"),
        (edited(version="2"), "version is '2', this program reads 1"),
        (dump_group(Group(1, "p", 0, [sample()])), "kind is 'group', expected 'trajectory'"),
        (edited(header='{"trajectories": [], "groups": []}'), "lengths int64"),
        (dump_trajectory(sample())[:-4], "SafetensorError"),
    ],
)
def test_malformed_bytes_say_what_is_wrong(blob, message):
    with pytest.raises(ValueError, match=r"malformed rlcore\.trajectories data") as caught:
        load_trajectory(blob)
    assert message in str(caught.value)


@pytest.mark.parametrize("change", [{"response_ids": np.arange(2)}, {"topk_logp": np.zeros((2, 3), np.float32)},
                                    {"logp_inf": np.zeros(2, np.float64)}])  # fmt: skip
def test_arrays_of_another_type_are_not_written(change):
    with pytest.raises(ValueError, match=f"trajectory train:7:1: {next(iter(change))} must be"):
        dump_trajectory(sample(**change))


def test_group_file(tmp_path):
    made = [Group(1, "p", 0, [sample(), sample(sample_index=2)]), Group(2, "q", 3, [])]
    path = tmp_path / "groups.safetensors"
    save_groups(path, made)
    assert [plain_group(g) for g in load_groups(path)] == [plain_group(g) for g in made]
    assert [p.name for p in tmp_path.iterdir()] == ["groups.safetensors"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"groups\.safetensors: malformed"):
        load_groups(path)
