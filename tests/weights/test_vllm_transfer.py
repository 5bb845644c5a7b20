"""vLLM's own sender and receivers behind our manifests, on CPU: NCCL is replaced by a group whose
every collective, the first included, blocks until all ranks have entered it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transfer_ends import SHAPES, Engine, Model, Receivers, ports, weights

from rlcore.rollout.engines.vllm.worker_side import BACKENDS, IpcReceiver, NcclReceiver
from rlcore.weights.manifest import make_manifest
from rlcore.weights.vllm_transfer import VllmSender

pytestmark = pytest.mark.usefixtures("cpu")


def publish(sender, engines, version):
    sent = weights(version)
    manifest = make_manifest(version, sent, full=True, seed=0)
    for engine in engines.values():
        engine.stop(manifest)
    receivers = Receivers(engines)
    sender.send(manifest, receivers, sent.items)
    for engine in engines.values():
        for model in engine.models():
            assert model.held.keys() == sent.keys() - {"lm_head.weight"}
            assert all(torch.equal(model.held[n], sent[n]) for n in model.held)
    return receivers.log


def test_every_rank_of_every_engine_receives_in_buckets(monkeypatch, cpu):
    sender = VllmSender("nccl", 0, ports(), bucket_bytes=128)
    engines = {"a": Engine(monkeypatch, 1), "b": Engine(monkeypatch, 2)}
    # the receivers are asked before rank 0 enters what blocks until they are there
    asked = ["begin", "receive", "finish"]
    assert publish(sender, engines, 1) == ["join", *asked]
    assert publish(sender, engines, 2) == asked
    # a bucket ends with the tensor that exceeds it
    assert max(m.most for e in engines.values() for m in e.models()) == 192
    # without "b": the group is formed anew, then again with its replacement
    del engines["b"]
    assert publish(sender, engines, 3) == ["join", *asked]
    engines["c"] = Engine(monkeypatch, 2)
    assert publish(sender, engines, 4) == ["join", *asked]
    assert [g.meeting.parties for g in cpu.values()] == [4, 2, 4]


def test_the_senders_thread_is_on_its_own_stream_afterwards(monkeypatch):
    """Streams are stood in for: vLLM's warm-up leaves a new one, also where it fails."""
    calls = []
    own = SimpleNamespace(synchronize=lambda: calls.append("synchronised"))
    now = [own]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", now.append)
    sender = VllmSender("nccl", 0, ports(), bucket_bytes=128)

    def form(manifest, receivers):
        now.append(SimpleNamespace())
        return SimpleNamespace(send_weights=send)

    def send():
        calls.append("sent")
        if len(calls) > 2:
            raise RuntimeError("a receiver died")

    monkeypatch.setattr(sender, "_form", form)
    manifest = make_manifest(1, weights(1), full=True, seed=0)
    receivers = SimpleNamespace(members=["a"], ranks=[1])
    sender.send(manifest, receivers, dict)
    assert calls == ["synchronised", "sent"] and now[-1] is own
    now.append(own)
    with pytest.raises(RuntimeError):
        sender.send(manifest, receivers, dict)
    assert now[-1] is own


def test_other_ranks_of_the_learner_gather_and_call_nobody(monkeypatch):
    gathered = []
    sender = VllmSender("nccl", 1, ports(), bucket_bytes=128)
    sent = weights(1)
    receivers = SimpleNamespace(members=["a"], ranks=[1])
    manifest = make_manifest(1, sent, full=True, seed=0)
    sender.send(manifest, receivers, lambda: map(gathered.append, sent.items()))
    assert len(gathered) == len(SHAPES)


def test_weights_that_will_be_proven_are_kept_as_they_pass():
    receiver = NcclReceiver.__new__(NcclReceiver)
    receiver.expect({"w1"}, {"lm_head.weight"})
    receiver.take(Model(), weights(1).items())
    assert set(receiver.kept) == {"w1"} and torch.equal(receiver.kept["w1"], weights(1)["w1"])


def test_vllm_finds_both_receivers_by_name():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    registered = WeightTransferEngineFactory._registry
    assert [registered[BACKENDS[n]]() for n in ("nccl", "ipc")] == [NcclReceiver, IpcReceiver]
