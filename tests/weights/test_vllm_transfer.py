"""vLLM's own sender and receivers behind our manifests, on CPU: NCCL is replaced by a group whose
every collective, the first included, blocks until all ranks have entered it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import rlcore.rollout.engines.vllm  # noqa: F401  sets vLLM's environment variables
from rlcore.rollout.engines.vllm.held_weights import HeldWeights
from rlcore.rollout.engines.vllm.weight_receivers import BACKENDS, IpcReceiver, NcclReceiver
from rlcore.rollout.specs import ActorSpec
from rlcore.rollout.transfer import EngineTransfer
from rlcore.weights.arrival import Arrival
from rlcore.weights.manifest import make_manifest
from rlcore.weights.vllm_transfer import VllmSender

WAIT_S = 20


class Group:
    """What NCCL does: ranks meet in every collective, and hang if one does not come."""

    def __init__(self, world):
        self.sent = None
        self.meeting = threading.Barrier(world, timeout=WAIT_S)

    def end(self, rank):
        """A communicator. Its constructor has a first collective, as vLLM's has."""
        self.meeting.wait()

        def broadcast(tensor, src, stream=None):
            if rank == src:
                self.sent = tensor
            self.meeting.wait()  # nobody goes on before everybody is here
            if rank != src:
                tensor.copy_(self.sent)
            self.meeting.wait()

        return SimpleNamespace(broadcast=broadcast, destroy=lambda: None)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """vLLM's transfer without CUDA: streams and synchronisation do nothing."""
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor
    from vllm.model_executor.model_loader import reload

    groups = {}
    lock = threading.Lock()

    def group(info):
        with lock:
            return groups.setdefault(info.master_port, Group(info.world_size))

    streams = (SimpleNamespace(synchronize=lambda: None),) * 2
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group(info).end(0))
    monkeypatch.setattr(
        nccl_engine,
        "worker_init_process_group",
        lambda info, parallel: group(info).end(info.rank_offset + parallel.rank),
    )
    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)
    return groups


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.held = {}
        self.most = 0

    def load_weights(self, weights):
        weights = list(weights)
        self.most = max(self.most, sum(t.numel() * t.element_size() for _, t in weights))
        self.held |= {n: t.clone() for n, t in weights}
        return {n for n, _ in weights}


class Ranks:
    """An engine of several processes, each with its part of vLLM's worker."""

    def __init__(self, count):
        self.pool = ThreadPoolExecutor(count)
        self.receivers = [
            NcclReceiver(
                SimpleNamespace(backend=BACKENDS["nccl"]),
                SimpleNamespace(
                    parallel_config=SimpleNamespace(
                        data_parallel_index=0, world_size=count, rank=rank
                    ),
                    model_config=None,
                ),
                torch.device("cpu"),
                Model(),
            )
            for rank in range(count)
        ]

    def rpc(self, method, *args):
        answers = self.pool.map(lambda r: getattr(self, method)(r, *args), self.receivers)
        first, *_ = answers
        return first

    def rl_check_live(self, receiver):
        pass

    def rl_quantised(self, receiver, names):
        return {}

    def rl_expect(self, receiver, keep):
        receiver.expect(keep, {"lm_head.weight"})

    def rl_all_received(self, receiver, names):
        assert receiver.loaded == set(names) - {"lm_head.weight"}

    def init_weight_transfer_engine(self, receiver, info):
        receiver.init_transfer_engine(receiver.parse_init_info(info))

    def start_weight_update(self, receiver):
        receiver.start_weight_update()

    def update_weights(self, receiver, info):
        receiver.update_weights(info)

    def finish_weight_update(self, receiver):
        receiver.finish_weight_update()


class Engine:
    """An actor's process: a thread that stops for weights, and calls from outside."""

    def __init__(self, monkeypatch, ranks):
        from rlcore.rollout.engines.vllm import held_weights

        self.ranks = Ranks(ranks)
        monkeypatch.setattr(held_weights, "read_shapes", lambda path: SHAPES)
        self.held = HeldWeights("", self.ranks, ActorSpec(num_gpus=1))
        self.arrival = None

    def stop(self, manifest):
        self.arrival = Arrival(WAIT_S)
        transfer = EngineTransfer(self.arrival)
        work = (transfer, tuple(manifest.checksums))
        self.thread = threading.Thread(target=self.held.receive, args=work, daemon=True)
        self.thread.start()
        self.arrival.reached.result(WAIT_S)

    def models(self):
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return [receiver.model for receiver in self.ranks.receivers]


class Receivers:
    def __init__(self, engines):
        self.engines = engines
        self.members = list(engines)
        self.ranks = [len(e.ranks.receivers) for e in engines.values()]
        self.pool = ThreadPoolExecutor(len(engines))
        self.log = []

    def start(self, verb, payloads):
        self.log.append(verb)
        pairs = zip(self.engines.values(), payloads, strict=True)
        calls = [self.pool.submit(e.arrival.ask, verb, payload) for e, payload in pairs]
        return lambda: [c.result(WAIT_S) for c in calls]


SHAPES = {f"w{i}": (4, 8) for i in range(9)} | {"lm_head.weight": (2,)}


def weights(version):
    g = torch.Generator().manual_seed(version)
    return {n: torch.randn(s, generator=g).bfloat16() for n, s in SHAPES.items()}


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


def ports():
    number = iter(range(100))
    return lambda: ("here", next(number))


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
    receiver.expect({"w1"}, ())
    receiver.take(Model(), weights(1).items())
    assert set(receiver.kept) == {"w1"} and torch.equal(receiver.kept["w1"], weights(1)["w1"])


def test_vllm_finds_both_receivers_by_name():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    registered = WeightTransferEngineFactory._registry
    assert [registered[BACKENDS[n]]() for n in ("nccl", "ipc")] == [NcclReceiver, IpcReceiver]
