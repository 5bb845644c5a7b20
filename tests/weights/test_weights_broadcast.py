"""The group transport between real processes, over gloo: order, loss of a member, replacement."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest
import torch
from timing import free_port

from rlcore.errors import DeadlineExceeded
from rlcore.weights.arrival import Arrival
from rlcore.weights.group import BroadcastGroup, GlooSender, GroupReceiver, Rendezvous
from rlcore.weights.manifest import ArrivalError, make_manifest, tensor_checksum

pytestmark = pytest.mark.processes
HOST = "127.0.0.1"


def weights(version: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(version)
    return {f"w{i}": torch.randn(5 + i, 7, generator=g).bfloat16() for i in range(6)} | {
        "one": torch.ones(1).bfloat16() * version
    }


def manifest(version: int):
    return make_manifest(version, weights(version), full=True, seed=0)


def joiner(timeout_s: float = 60.0):
    times = {"join_timeout_s": timeout_s, "timeout_s": timeout_s}
    return partial(BroadcastGroup, **times, bucket_bytes=200)


def listens_on() -> set[str]:
    return {
        c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN
    }


def receiver(connection) -> None:
    """A process that takes publications: for each version sent to it, whether it came whole."""
    end = GroupReceiver(joiner())
    while (version := connection.recv()) is not None:
        arrival, got = Arrival(60.0), {}

        def load(version=version, arrival=arrival, got=got):
            for bucket in end.buckets(manifest(version), arrival):
                got.update({n: tensor_checksum(t) for n, t in bucket.items()})

        engine = threading.Thread(target=load)
        engine.start()
        arrival.reached.result(30)
        connection.send("stopped")
        verb = ""
        while verb != "finish":
            verb, payload = connection.recv()
            arrival.ask(verb, payload)
            connection.send("done")
        engine.join(30)
        connection.send(got == manifest(version).checksums and listens_on() <= {HOST})


class Fleet:
    """Receiving processes by name, as the sender calls them."""

    def __init__(self) -> None:
        # forked from a server that has imported this: a process starts at once
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rlcore.weights.group"])
        self._pool = ThreadPoolExecutor(8)
        self.processes, self.pipes, self.log = {}, {}, []

    @property
    def members(self):
        return list(self.pipes)

    @property
    def ranks(self):
        return [1] * len(self.pipes)

    def add(self, name: str) -> None:
        self.pipes[name], theirs = self._context.Pipe()
        self.processes[name] = self._context.Process(target=receiver, args=(theirs,), daemon=True)
        self.processes[name].start()
        theirs.close()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).join(30)
        self.pipes.pop(name)

    def start(self, verb, payloads):
        self.log.append(verb)

        def call(pipe, payload):
            pipe.send((verb, payload))
            assert pipe.recv() == "done"

        calls = [
            self._pool.submit(call, p, payload)
            for p, payload in zip(self.pipes.values(), payloads, strict=True)
        ]
        return lambda: [c.result(60) for c in calls]

    def publish(self, sender, version: int, tensors=None) -> list[bool]:
        for pipe in self.pipes.values():
            pipe.send(version)
        assert all(pipe.recv() == "stopped" for pipe in self.pipes.values())
        sender.send(manifest(version), self, (tensors or weights(version)).items)
        return [pipe.recv() for pipe in self.pipes.values()]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(30)  # no zombie stays for tests that list their children


@pytest.fixture
def fleet():
    fleet = Fleet()
    yield fleet
    fleet.close()


def free_address() -> tuple[str, int]:
    return HOST, free_port()


def test_a_group_carries_versions_loses_a_member_and_takes_a_replacement(fleet):
    sender = GlooSender(0, joiner(), free_address)
    fleet.add("a")
    fleet.add("b")
    assert [fleet.publish(sender, v) for v in (1, 2)] == [[True, True]] * 2
    assert fleet.log == ["join", "receive", "finish", "receive", "finish"]
    assert listens_on() == {HOST}  # the store and gloo's own socket: for no other machine
    fleet.kill("b")
    assert fleet.publish(sender, 3) == [True]
    fleet.add("c")  # b's replacement
    assert fleet.publish(sender, 4) == [True, True]
    assert fleet.log.count("join") == 3


def test_a_member_lost_while_weights_are_sent_is_an_error_and_no_hang(fleet):
    sender = GlooSender(0, joiner(20.0), free_address)
    fleet.add("a")
    fleet.add("b")
    fleet.publish(sender, 1)

    def then_lost(version):
        for i, pair in enumerate(weights(version).items()):
            if i == 3:
                fleet.processes["b"].kill()
                fleet.processes["b"].join(30)
            yield pair

    for pipe in fleet.pipes.values():
        pipe.send(2)
    assert all(pipe.recv() == "stopped" for pipe in fleet.pipes.values())
    with pytest.raises(DeadlineExceeded, match="a rank was lost"):
        sender.send(manifest(2), fleet, lambda: then_lost(2))


def test_missing_ranks_are_waited_for_no_longer_than_the_deadline():
    with pytest.raises(DeadlineExceeded, match="3 ranks to join"):
        joiner(2.0)(Rendezvous(*free_address(), rank=0, world_size=3))


def test_a_set_that_is_not_what_was_announced_is_not_sent(fleet):
    sender = GlooSender(0, joiner(), free_address)
    fleet.add("a")
    fleet.publish(sender, 1)
    with pytest.raises(ArrivalError, match="one is missing"):
        fleet.publish(sender, 2, {n: t for n, t in weights(2).items() if n != "one"})


def test_other_ranks_of_the_learner_take_part_in_gathering_only():
    gathered = []
    sender = GlooSender(1, joiner(), free_address)
    sender.send(manifest(1), Fleet(), lambda: map(gathered.append, weights(1).items()))
    assert len(gathered) == 7
