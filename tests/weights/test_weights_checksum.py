"""Laws of the checksum, and what a manifest promises and refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.weights import manifest
from rlcore.weights.manifest import (
    CHUNK,
    ArrivalError,
    make_manifest,
    sample_names,
    tensor_checksum,
    verify_checksums,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 8
    return values.to(dtype)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 70), st.integers(1, 9), st.sampled_from(DTYPES))
def test_a_slice_view_has_the_checksum_of_its_copy(seed, rows, cols, dtype):
    whole = tensor(seed, rows + 5, cols + 3, dtype=dtype)
    for view in (whole[2 : 2 + rows], whole[:, 1 : 1 + cols], whole.t()):
        assert (
            tensor_checksum(view)
            == tensor_checksum(view.clone())
            == tensor_checksum(view.contiguous())
        )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.data())
def test_one_flipped_bit_or_one_swap_is_caught(seed, data):
    t = tensor(seed, 37, 11)
    at = data.draw(st.integers(0, t.numel() - 1))
    flipped = t.clone()
    flipped.view(torch.int32).view(-1)[at] ^= 1 << data.draw(st.integers(0, 30))
    assert tensor_checksum(flipped) != tensor_checksum(t)
    other = data.draw(st.integers(0, t.numel() - 1).filter(lambda i: i != at))
    swapped = t.clone().view(-1)
    swapped[[at, other]] = swapped[[other, at]]
    assert tensor_checksum(swapped.view(37, 11)) != tensor_checksum(t)


def test_shape_dtype_sign_of_zero_and_chunk_order_count():
    t = tensor(0, 6, 4)
    assert tensor_checksum(t.view(4, 6)) != tensor_checksum(t)
    assert tensor_checksum(t.view(torch.int32)) != tensor_checksum(t)
    assert tensor_checksum(torch.zeros(4)) != tensor_checksum(-torch.zeros(4))
    assert tensor_checksum(torch.zeros(4)) != tensor_checksum(torch.zeros(5))
    long = tensor(1, 2 * CHUNK + 3)
    moved = torch.cat([long[CHUNK : 2 * CHUNK], long[:CHUNK], long[2 * CHUNK :]])
    assert tensor_checksum(moved) != tensor_checksum(long)
    assert 0 <= tensor_checksum(long) < 2**63


def test_the_checksum_is_the_same_in_every_process_and_release():
    assert tensor_checksum(torch.arange(1000, dtype=torch.float32)) == 3445085296600647003


@pytest.mark.parametrize("size", [5, CHUNK, 3 * CHUNK, 7 * CHUNK + 5])
def test_chunks_that_are_summed_together_as_on_gpus_give_that_checksum_too(monkeypatch, size):
    whole = torch.arange(size, dtype=torch.int64).to(torch.int8)
    alone = tensor_checksum(whole)
    assert tensor_checksum(whole.flip(0)) != alone
    monkeypatch.setattr(manifest, "_at_once", lambda device: 3)
    assert tensor_checksum(whole) == alone


def test_sampled_names_take_their_turns():
    names = [f"w{i}" for i in range(40)]
    assert sample_names(names, 99, seed=0) == names
    assert sample_names(names, 8, seed=3) == sample_names(names, 8, seed=3)
    seen = {n for seed in range(60) for n in sample_names(names, 8, seed=seed)}
    assert seen == set(names)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": tensor(i, 4, 3 + i) for i in range(12)}


def test_a_manifest_accepts_what_it_announced(tensors):
    sampled = make_manifest(5, tensors, full=False, seed=1)
    assert len(sampled.checksums) == 8 and not sampled.full and sampled.dtype == "float32"
    assert (
        make_manifest(6, tensors, full=False, seed=1).checksums.keys() != sampled.checksums.keys()
    )
    full = make_manifest(5, tensors, full=True, seed=1)
    verify_checksums(full, {n: tensor_checksum(t) for n, t in tensors.items()})


def test_lost_and_altered_weights_are_named(tensors):
    manifest = make_manifest(5, tensors, full=True, seed=1)
    held = {n: tensor_checksum(t) for n, t in tensors.items()}
    altered = {**held, "layer.7.weight": held["layer.7.weight"] ^ 1}
    with pytest.raises(
        ArrivalError, match=r"version 5 did not arrive whole: layer\.7\.weight differs"
    ):
        verify_checksums(manifest, altered)
    del held["layer.2.weight"]
    with pytest.raises(ArrivalError, match=r"layer\.2\.weight has no checksum"):
        verify_checksums(manifest, held)


def test_a_tied_weight_is_published_once(tensors):
    tensors["lm_head.weight"] = tensors["layer.0.weight"]
    with pytest.raises(ValueError, match="share one storage"):
        make_manifest(0, tensors, full=True, seed=0)
    with pytest.raises(ValueError, match="one dtype"):
        make_manifest(0, {"a": torch.ones(2), "b": torch.ones(2).half()}, full=True, seed=0)
    with pytest.raises(ValueError, match="nothing to publish"):
        make_manifest(0, {}, full=True, seed=0)
