"""The broadcast transport between real processes, over gloo."""

from __future__ import annotations

import multiprocessing
import socket

import psutil
import pytest
import torch

from rlcore.errors import DeadlineExceeded
from rlcore.weights.checksum import tensor_checksum
from rlcore.weights.manifest import make_manifest
from rlcore.weights.nccl import NcclTransport
from rlcore.weights.rendezvous import Rendezvous

pytestmark = pytest.mark.processes


def weights(version: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(version)
    return {f"w{i}": torch.randn(5 + i, 7, generator=g).bfloat16() for i in range(6)} | {
        "one": torch.ones(1).bfloat16() * version
    }


def member(rank: int, port: int, timeout_s: float) -> NcclTransport:
    place = Rendezvous("127.0.0.1", port, rank, world_size=3)
    times = {"join_timeout_s": timeout_s, "timeout_s": timeout_s}
    return NcclTransport(place, backend="gloo", **times, buffer_bytes=200)


def listens_on() -> set[str]:
    return {
        c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN
    }


def receive(rank: int, port: int, answers, versions: int) -> None:
    transport = member(rank, port, 60.0)
    for version in range(versions):
        manifest = make_manifest(version, weights(version), full=True, seed=0)
        got = transport.receive(manifest, version)
        whole = {n: tensor_checksum(t) for n, t in got.items()} == manifest.checksums
        answers.put(whole and listens_on() == {"127.0.0.1"})


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_group(sent: int, received: int, timeout_s: float):
    """Rank 0 here, two receivers in processes of their own; returns what those found."""
    context = multiprocessing.get_context("spawn")
    port, answers = free_port(), context.Queue()
    others = [context.Process(target=receive, args=(r, port, answers, received)) for r in (1, 2)]
    for p in others:
        p.start()
    try:
        transport = member(0, port, timeout_s)
        # the store and gloo's own socket: other machines cannot reach them
        assert listens_on() == {"127.0.0.1"}
        for version in range(sent):
            tensors = weights(version)
            transport.publish(make_manifest(version, tensors, full=True, seed=0), tensors)
        transport.wait_sent()
        return [answers.get(timeout=60) for _ in range(2 * received)]
    finally:
        for p in others:
            p.join(5 if sent > received else 60)
            p.kill()


def test_every_version_reaches_every_receiver_whole():
    assert run_group(sent=3, received=3, timeout_s=60.0) == [True] * 6


def test_a_lost_receiver_is_an_error_not_a_hang():
    with pytest.raises(DeadlineExceeded, match="a rank was lost"):
        run_group(sent=3, received=1, timeout_s=20.0)


def test_missing_ranks_are_waited_for_no_longer_than_the_deadline():
    with pytest.raises(DeadlineExceeded, match="3 ranks to join"):
        member(0, free_port(), 2.0)
