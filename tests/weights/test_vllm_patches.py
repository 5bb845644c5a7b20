"""Patches by vLLM's own sparse sender and receivers, on CPU, over a group that blocks as NCCL's
do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transfer_ends import Engine, Receivers, ports, weights

from rlcore.errors import UserError
from rlcore.types import WeightManifest
from rlcore.weights.manifest import ArrivalError, make_manifest, verify_checksums
from rlcore.weights.sending import changed_share, sent_bytes
from rlcore.weights.vllm_transfer import PatchSender, VllmSender

pytestmark = pytest.mark.usefixtures("cpu")
BUCKET = 100
ENTRY = 6  # bytes: an int32 and a bfloat16


def make_sender(rank=0, full_weights_every=4):
    whole = VllmSender("nccl", rank, ports(), bucket_bytes=BUCKET)
    return PatchSender(rank, whole, bucket_bytes=BUCKET, full_weights_every=full_weights_every)


def stepped(tensors, seed, share=0.1):
    """The same with about `share` of the entries one bit larger, and one zero negative."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16).clone()
        out[name] = (bits + (torch.rand(bits.shape, generator=g) < share)).view(torch.bfloat16)
    out["w3"][0, 0] = -0.0 if seed % 2 else 0.0
    return out


def publish(sender, engines, version, sent):
    """(what the sender says of it, what it asked the receivers); held bits are those sent."""
    manifest = make_manifest(version, sent, full=True, seed=0)
    for engine in engines.values():
        engine.stop(manifest)
    receivers = Receivers(engines)
    sending = sender.send(manifest, receivers, sent.items)
    for engine in engines.values():
        for model in engine.models():
            for name, held in model.held.items():
                assert torch.equal(held.view(torch.int16), sent[name].view(torch.int16))
    return sending, receivers.log


def changed(before, after):
    bits = [(before[n].view(torch.int16), t.view(torch.int16)) for n, t in after.items()]
    return sum(int((old != new).sum()) for old, new in bits)


def test_patched_engines_hold_the_bits_of_whole_sets(monkeypatch):
    sender = make_sender()
    engines = {"a": Engine(monkeypatch, 1), "b": Engine(monkeypatch, 2)}
    tensors, whole = weights(0), []
    for version in range(12):
        if version == 6:  # has no weights that could be patched
            engines["late"] = Engine(monkeypatch, 2)
        if version == 11:
            del engines["a"]
        before, tensors = tensors, stepped(tensors, seed=version)
        sending, asked = publish(sender, engines, version, tensors)
        if sending is None:
            whole.append(version)
            continue
        entries = changed(before, tensors)
        assert (sending.changed, sending.bytes) == (entries, ENTRY * entries)
        assert asked[0] == "begin" and asked[-1] == "finish"
        assert set(asked[1:-1]) == {"receive"} and len(asked) > 3  # in buckets
        manifest = make_manifest(version, tensors, full=True, seed=0)
        assert sent_bytes(manifest, sending) == sending.bytes
        assert 0.05 < changed_share([(manifest, sending)]) < 0.15
    # every fourth, with the one that was late, and without the one that left
    assert whole == [0, 4, 6, 10, 11]


def test_a_version_in_which_nothing_changed_is_one(monkeypatch):
    sender, engines = make_sender(), {"a": Engine(monkeypatch, 2)}
    publish(sender, engines, 1, weights(1))
    sending, asked = publish(sender, engines, 2, weights(1))
    assert (sending.version, sending.bytes, sending.changed) == (2, 0, 0)
    assert asked == ["begin", "finish"]


def test_weights_that_differ_before_a_patch_are_found_by_the_manifest(monkeypatch):
    sender, engine = make_sender(), Engine(monkeypatch, 1)
    tensors = {n: t for n, t in weights(1).items() if n != "lm_head.weight"}
    for version in (1, 2):
        publish(sender, {"a": engine}, version, tensors)
        manifest = make_manifest(version, tensors, full=True, seed=0)
        verify_checksums(manifest, engine.held.checksums(manifest.names))
        tensors = stepped(tensors, seed=version)
    engine.models()[0].held["w1"][2, 2] += 1
    manifest = make_manifest(3, tensors, full=True, seed=0)
    with pytest.raises(AssertionError):
        publish(sender, {"a": engine}, 3, tensors)
    with pytest.raises(ArrivalError, match="w1 differs from what was published"):
        verify_checksums(manifest, engine.held.checksums(manifest.names))


def test_nan_is_refused_and_a_whole_set_follows(monkeypatch):
    sender, engine = make_sender(), Engine(monkeypatch, 1)
    publish(sender, {"a": engine}, 1, weights(1))
    broken = weights(1)
    broken["w4"][1, 1] = float("nan")
    manifest = make_manifest(2, broken, full=True, seed=0)
    engine.stop(manifest)
    with pytest.raises(ValueError, match="w4 of version 2 has become NaN"):
        sender.send(manifest, Receivers({"a": engine}), broken.items)
    engine.arrival.ask("finish")
    engine.models()
    sending, asked = publish(sender, {"a": engine}, 3, stepped(weights(1), seed=3))
    assert sending is None and asked == ["begin", "receive", "finish"]


def test_other_ranks_of_the_learner_gather_once_and_keep_nothing():
    sender, gathered = make_sender(rank=1), []
    receivers = SimpleNamespace(members=["a"], ranks=[1])
    for version in (1, 2):
        manifest = make_manifest(version, weights(1), full=True, seed=0)
        read = lambda: map(gathered.append, weights(1).items())  # noqa: E731
        assert sender.send(manifest, receivers, read) is None
        assert len(gathered) == version * len(manifest.names)
    assert not sender._held


def test_a_receiver_takes_no_patches_before_a_whole_set_of_its_group(monkeypatch):
    engines = {"a": Engine(monkeypatch, 1)}
    (receiver,) = engines["a"].ranks.receivers
    with pytest.raises(RuntimeError, match="before a whole set"):
        receiver.expect((), (), patched=True)
    publish(make_sender(), engines, 1, weights(1))
    receiver.expect((), (), patched=True)
    with pytest.raises(RuntimeError, match="before a whole set"):
        receiver.expect((), (), patched=True)  # the patches announced first have not all come


def test_weights_beyond_the_reach_of_indices_are_refused():
    manifest = WeightManifest(1, ("w",), ((1 << 16, 1 << 15),), "bfloat16", {}, False)
    receivers = SimpleNamespace(members=["a"], ranks=[1])
    with pytest.raises(UserError, match=r"cluster.full_weights_every=4 .* full_weights_every=1"):
        make_sender().send(manifest, receivers, dict)


def test_a_patch_of_one_part_of_a_fused_parameter_leaves_the_other(monkeypatch):
    sender, engine = make_sender(), Engine(monkeypatch, 1)
    publish(sender, {"a": engine}, 1, weights(1))
    tensors = weights(1)
    tensors["w1"][3, 3] *= 2
    sending, _ = publish(sender, {"a": engine}, 2, tensors)
    assert sending.changed == 1
