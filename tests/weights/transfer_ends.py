"""Both ends of vLLM's weight transfer as tests on CPU have them: vLLM's own sender and receivers, a
group whose every collective, the first included, blocks until all ranks have entered it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from timing import deadline

import rlcore.rollout.engines.vllm  # noqa: F401  sets vLLM's environment variables
from rlcore.rollout.engines.vllm.weight_loader import WeightLoader
from rlcore.rollout.engines.vllm.worker_side import BACKENDS, NcclReceiver
from rlcore.rollout.specs import ActorSpec
from rlcore.weights.arrival import Arrival, EngineTransfer
from rlcore.weights.manifest import tensor_checksum

SHAPES = {f"w{i}": (4, 8) for i in range(9)} | {"lm_head.weight": (2,)}
WAIT_S = deadline(20)


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

        device = torch.device("cpu")
        return SimpleNamespace(broadcast=broadcast, destroy=lambda: None, device=device)


class Model(torch.nn.Module):
    """Loads as vLLM's layers do: by `copy_`, two weights into parts of one parameter."""

    def __init__(self):
        super().__init__()
        own = {n: s for n, s in SHAPES.items() if n != "lm_head.weight"}
        self.held = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in own.items()}
        self.held |= zip(("w0", "w1"), torch.zeros(8, 8, dtype=torch.bfloat16).split(4))
        self.most = 0

    def load_weights(self, weights):
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        weights = list(weights)
        self.most = max(self.most, sum(t.numel() * t.element_size() for _, t in weights))
        for name, tensor in weights:
            default_weight_loader(self.held[name], tensor)
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

    def rl_expect(self, receiver, keep, patched):
        receiver.expect(keep, {"lm_head.weight"}, patched=patched)

    def rl_all_received(self, receiver, names):
        assert receiver.loaded == set(names) - {"lm_head.weight"}

    def rl_checksums(self, receiver, shapes, names):
        return {n: tensor_checksum(receiver.model.held[n]) for n in names}

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
        from rlcore.rollout.engines.vllm import weight_loader

        self.ranks = Ranks(ranks)
        monkeypatch.setattr(weight_loader, "read_shapes", lambda path: SHAPES)
        self.held = WeightLoader("", self.ranks, ActorSpec(num_gpus=1))
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


def weights(version):
    g = torch.Generator().manual_seed(version)
    return {n: torch.randn(s, generator=g).bfloat16() for n, s in SHAPES.items()}


def ports():
    number = iter(range(100))
    return lambda: ("here", next(number))
