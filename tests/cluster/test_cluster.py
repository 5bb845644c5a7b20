"""Which cluster a run is on, what it waits for there and what it refuses."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from timing import deadline, wait_until

from rlcore.cluster import placement
from rlcore.cluster.calls import kill
from rlcore.cluster.placement import (
    SharedPlaces,
    actor_class,
    beside_driver,
    free_port,
    rendezvous,
)
from rlcore.cluster.ray_cluster import (
    check_cluster,
    cluster,
    head_answers,
    idle_gpus,
    joined_address,
    joined_head_lost,
)
from rlcore.cluster.specs import RaySpec
from rlcore.errors import DeadlineExceeded, UserError


def spec(address=None):
    return RaySpec(address=address, num_cpus=2, object_store_mib=100)


def test_an_unreachable_head_is_refused_at_once_but_waited_for_in_a_recovery():
    where = spec(f"127.0.0.1:{free_port()}")
    needs = {"needed_cpus": 1, "needed_gpus": 0}
    with pytest.raises(UserError, match="does not answer"), cluster(where, **needs):
        pass
    with (
        pytest.raises(
            DeadlineExceeded, match=r"does not answer.*after 1 s \(cluster\.start_timeout_s\)"
        ),
        cluster(where, patience_s=1, **needs),
    ):
        pass


def test_what_this_machine_does_not_have_is_refused_before_ray_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with (
        pytest.raises(
            UserError, match=r"learner\.num_gpus ask for 1 GPUs where this machine shows 0"
        ),
        cluster(spec(), needed_cpus=1, needed_gpus=1),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"cluster\.num_cpus=2 is too few"),
        cluster(spec(), needed_cpus=3, needed_gpus=0),
    ):
        pass
    assert not ray.is_initialized()


def test_ranks_on_a_joined_cluster_meet_on_rank_0_s_node(monkeypatch):
    rank = SimpleNamespace(address=SimpleNamespace(remote=lambda port: ("10.0.0.7", port)))
    monkeypatch.setattr(placement, "get", lambda ref, **limits: ref)
    wait = {"start_timeout_s": 1}
    assert rendezvous([rank], port=0, joined=False, **wait)[0] == "127.0.0.1"
    assert rendezvous([rank], port=4242, joined=True, **wait) == ("10.0.0.7", 4242)


def test_the_environment_s_cluster_is_joined_unless_one_is_named(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert joined_address(None) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert joined_address(None) == "10.0.0.1:6379"
    assert joined_address("10.0.0.2:6379") == "10.0.0.2:6379"


def test_a_heartbeat_of_the_head_that_is_answered_as_it_is_cancelled_ends(monkeypatch):
    """Else the watch of the roles goes on, and the run that has ended waits for it endlessly."""
    connect = asyncio.open_connection

    async def cancelled(server):
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(
            ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address)
        )
        heartbeat = asyncio.create_task(head_answers())

        async def connected(host, port):
            answer = await connect(host, port)
            heartbeat.cancel()
            return answer

        monkeypatch.setattr(asyncio, "open_connection", connected)
        await asyncio.wait([heartbeat], timeout=deadline(10))
        return heartbeat.cancelled()

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert asyncio.run(cancelled(server))


@pytest.mark.parametrize(("have", "said"), [({"GPU": 8.0}, 1), ({"GPU": 6.0}, 0), ({}, 0)])
def test_gpus_that_no_role_uses_are_said(have, said, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: have)
    lines = idle_gpus(6.0 if have else 0.0)
    assert len(lines) == said and all("2 of the cluster's 8 GPUs" in line for line in lines)


def raylet(address, user):
    cmdline = ["/ray/raylet", f"--gcs-address={address}"]
    return SimpleNamespace(info={"name": "raylet", "cmdline": cmdline, "username": user})


ME = psutil.Process().username()


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ([], "finds no cluster on this machine: give"),
        ([("10.0.0.1:1", "another")], "finds no cluster but one of user another, at 10.0.0.1:1"),
        ([("10.0.0.1:1", ME), ("10.0.0.1:2", ME)], "finds 2 clusters on this machine"),
    ],
)
def test_auto_joins_only_the_one_cluster_of_this_user(here, said, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = [raylet(*each) for each in here]
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: found)
    needs = {"needed_cpus": 1, "needed_gpus": 0}
    with pytest.raises(UserError, match=said), cluster(spec("auto"), **needs):
        pass


def test_auto_names_the_cluster_which_must_answer(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"127.0.0.1:{free_port()}"
    found = [raylet(address, ME), raylet("10.0.0.1:1", "another")]
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: found)
    needs = {"needed_cpus": 1, "needed_gpus": 0}
    said = rf"cluster.address=auto \({address}\) does not answer"
    with pytest.raises(UserError, match=said), cluster(spec("auto"), **needs):
        pass


def test_a_dry_run_tries_the_port_of_a_cluster_and_does_not_join_it():
    """A cluster may take connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        check_cluster(spec(address), needed_cpus=1, needed_gpus=0, store_bytes=0)
    assert not ray.is_initialized()
    with pytest.raises(UserError, match=f"{address} does not answer"):
        check_cluster(spec(address), needed_cpus=1, needed_gpus=0, store_bytes=0)


@pytest.mark.cluster
def test_every_role_without_resources_runs_beside_the_driver(monkeypatch):
    class Role:  # not of this module, which the nodes cannot import
        def node(self):
            return ray.get_runtime_context().get_node_id()

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=1, include_dashboard=False, object_store_memory=10**8)
        for _ in range(2):
            nodes.add_node(num_cpus=1, object_store_memory=10**8)
        with cluster(spec(address=nodes.address), needed_cpus=1, needed_gpus=0):
            place = beside_driver()
            role = actor_class(Role, num_cpus=0, scheduling_strategy=place)
            asked = [role.remote().node.remote() for _ in range(6)]
            assert set(ray.get(asked, timeout=deadline(60))) == {place.node_id}
            assert place.node_id == ray.get_runtime_context().get_node_id()
    finally:
        nodes.shutdown()


@pytest.mark.cluster
def test_a_local_cluster_has_no_dashboard_and_ends_its_own_processes_alone(monkeypatch, capfd):
    """SIGTERM ends it, and nothing is printed: Ray's handler of C++ would print a stack."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    kept = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's, where another test started it
    driver = psutil.Process()
    before = set(driver.children(recursive=True))  # of tests that ran earlier
    with (
        pytest.raises(KeyboardInterrupt),
        cluster(spec(), needed_cpus=1, needed_gpus=0),
    ):
        niceness = ray.remote(num_cpus=0)(lambda: os.nice(0))
        assert ray.get(niceness.remote(), timeout=deadline(60)) == os.nice(0)
        # as W&B's service is, which starts beside Ray
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        ignored = before | {psutil.Process(other.pid)}
        processes = [p for p in driver.children(recursive=True) if p not in ignored]
        words = ""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # helpers of Ray's start end
                words += " ".join(process.cmdline())
        assert "gcs_server" in words and "raylet" in words
        assert "dashboard.py" not in words and "/monitor.py" not in words
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(deadline(10))
    assert "SIGTERM" not in capfd.readouterr().err
    try:
        assert other.poll() is None
        _, left = psutil.wait_procs(processes, timeout=deadline(30))
        assert not left
    finally:
        other.kill()
        other.wait()
        signal.signal(signal.SIGTERM, kept)


class Head:
    """Ray on this machine that was started beforehand, with a node of two CPUs."""

    def __init__(self, folder):
        self._log = folder / "head"
        self._sessions = tempfile.mkdtemp(prefix="ray-")  # sockets: their paths must be short
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self):
        words = ["--head", "--block", f"--port={self._port}", "--node-ip-address=127.0.0.1"]
        words += ["--num-cpus=2", f"--object-store-memory={2**27}", "--include-dashboard=false"]
        ray_program = str(Path(sys.executable).parent / "ray")
        self._process = subprocess.Popen(
            [ray_program, "start", *words, f"--temp-dir={self._sessions}"],
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
        )
        wait_until(lambda: "Ray runtime started" in self._log.read_text(), 60, "the head")

    def stop(self):
        """End the head with its node, and what the node has started."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        self._process.wait(deadline(60))
        for process in psutil.wait_procs(family, timeout=5)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self):
        if self._process.poll() is None:
            self.stop()
        shutil.rmtree(self._sessions, ignore_errors=True)


@pytest.fixture
def head(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    started = Head(tmp_path)
    yield started
    ray.shutdown()
    started.close()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("when", ["before the run has left", "after that"])
def test_a_process_whose_cluster_lost_its_head_joins_the_next_one(head, when):
    """A head without a store of its own forgets its cluster, and may refuse calls of one before."""
    needs = {"needed_cpus": 1, "needed_gpus": 0, "patience_s": deadline(60)}
    with cluster(spec(head.address), **needs):
        actor = actor_class(threading.Event, num_cpus=1).remote()
        assert ray.get(actor.is_set.remote(), timeout=deadline(60)) is False
        head.stop()
        if when == "before the run has left":
            head.start()
        kill(actor)
    if when == "after that":
        with (
            pytest.raises(DeadlineExceeded, match="does not answer"),
            cluster(spec(head.address), **needs | {"patience_s": 1}),
        ):
            pass
        head.start()
    with cluster(spec(head.address), **needs):
        another = actor_class(threading.Event, num_cpus=1).remote()
        assert ray.get(another.is_set.remote(), timeout=deadline(60)) is False


def test_a_head_that_refuses_connections_is_lost_where_the_cluster_was_joined(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        connected = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: connected)
        assert joined_head_lost(address)
        head.listen()
        assert not joined_head_lost(address)
    assert joined_head_lost("auto")  # whatever names the cluster
    assert not joined_head_lost(None)  # one of this process, which ends it


def test_a_signal_inside_ray_s_start_interrupts_the_command(monkeypatch):
    """Also a command that says nothing of SIGTERM itself, which is as before afterwards."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def start(**settings):
        ray._private.utils.set_sigterm_handler(lambda *_: pytest.fail("Ray's handler"))
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("no signal came")

    monkeypatch.setattr(ray, "init", start)
    with (
        pytest.raises(KeyboardInterrupt),
        cluster(spec(), needed_cpus=1, needed_gpus=0),
    ):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.cluster
def test_every_engine_has_the_gpu_of_its_rank_also_one_in_the_place_of_another():
    """Ray is given two GPUs. Fractions alone would put both ranks on one of them."""

    class Place:  # workers could not import a module of tests
        def gpus(self):
            return ray.get_gpu_ids()

    memory = 100 << 20
    ray.init("local", num_cpus=4, num_gpus=2, object_store_memory=memory, include_dashboard=False)
    try:
        bundles = [{"CPU": 2.0, "GPU": 1.0}] * 2
        places = SharedPlaces(bundles, start_timeout_s=deadline(30))
        place = actor_class(Place, num_cpus=1)
        engines = [place.options(**places.of_next_engine()).remote() for _ in bundles]
        ranks = [place.options(**places.of_rank(i)).remote() for i in range(len(bundles))]

        def gpus(processes):
            return ray.get([p.gpus.remote() for p in processes], timeout=deadline(60))

        found = gpus(ranks)
        assert gpus(engines) == found and len({tuple(gpu) for gpu in found}) == 2
        ray.kill(engines[1])
        engines[1] = place.options(**places.of_next_engine()).remote()
        assert gpus(engines) == found
    finally:
        ray.shutdown()
