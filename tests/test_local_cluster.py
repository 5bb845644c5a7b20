"""The stand-in for Ray does what Ray does: one program, run with either."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from timing import deadline

PROGRAM = """
import asyncio, json, os, sys, tempfile, threading, time
import numpy as np
import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from rlcore.cluster.placement import actor_class

class Plain:
    def __init__(self, start):
        self.seen = [start]
        self.opened = threading.Event()

    def add(self, item):
        self.seen.append(item)
        return len(self.seen), dict(os.environ).get("OMP_NUM_THREADS")

    def listed(self):
        return list(self.seen)

    def title(self):
        return "Plain" in " ".join(psutil.Process().cmdline())

    def two(self):
        return "a", "b"

    def fail(self):
        raise ValueError("no")

    def wait(self):
        return self.opened.wait(60)

    @ray.method(concurrency_group="side")
    def open(self):
        self.opened.set()

    def writes(self, array):
        try:
            array[0] = 1
        except ValueError:
            return "read-only"

    def asks(self, other, boxed):
        return ray.get(other.listed.remote()), ray.get(boxed[0]).sum()

class Meets:
    def __init__(self):
        self.event = asyncio.Event()

    async def come(self):
        await self.event.wait()
        return "met"

    async def call(self):
        self.event.set()

def raised(ref, **more):
    try:
        ray.get(ref, **more)
    except (RayActorError, RayTaskError, GetTimeoutError) as e:
        kinds = [k.__name__ for k in (RayActorError, RayTaskError, GetTimeoutError, ValueError)
                 if isinstance(e, k)]
        return [*kinds, str(getattr(e, "cause", None))]

def named(name):
    try:
        return bool(ray.get_actor(name))
    except ValueError:
        return False

def run():
    found = {}
    plain = actor_class(Plain, num_cpus=0, concurrency_groups={"side": 1})
    one, two = (plain.options(name=n).remote(v) for n, v in (("one", "x"), ("two", "y")))
    refs = [one.add.remote(i) for i in range(100)]
    found["order"] = ray.get(one.listed.remote()) == ["x", *range(100)]
    found["threads"] = ray.get(refs[-1])
    found["title"] = ray.get(one.title.remote())
    found["ready"] = ray.get(one.__ray_ready__.remote())
    a, b = one.two.options(num_returns=2).remote()
    found["returns"] = ray.get([a, b])
    found["resolved"] = ray.get(two.add.remote(b)), ray.get(two.listed.remote())
    found["error"] = raised(one.fail.remote())
    waits = one.wait.remote()
    found["late"] = raised(waits, timeout=0.05), [len(r) for r in ray.wait([waits], timeout=0)]
    ray.get(one.open.remote())  # in its own group, while the other waits
    found["opened"] = ray.get(waits), [len(r) for r in ray.wait([waits], timeout=30)]
    boxed = [ray.put(np.arange(4.0))]
    found["array"] = ray.get(one.writes.remote(np.zeros(3)))
    found["asked"] = [str(x) for x in ray.get(one.asks.remote(ray.get_actor("two"), boxed))]
    meets = actor_class(Meets, num_cpus=0).remote()
    come = meets.come.remote()
    ray.get(meets.call.remote())
    found["met"] = ray.get(come)

    async def awaited():
        task = asyncio.ensure_future(asyncio.wait_for(one.listed.remote(), 30))
        return len(await task)

    found["awaited"] = asyncio.run(awaited())
    died = two.wait.remote()
    found["named"] = named("two"), named("three")
    ray.kill(two)
    found["died"] = raised(died)[0]
    while named("two"):
        time.sleep(0.01)
    found["later"] = raised(two.listed.remote())[0]
    print("FOUND" + json.dumps(found))

if sys.argv[1] == "ray":
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
             object_store_memory=10**8)
    run()
    ray.shutdown()
else:
    from local_cluster import put_in_place
    with tempfile.TemporaryDirectory() as root:
        driver = put_in_place(root, sys.argv[2])
        ray.init()
        try:
            run()
        finally:
            ray.shutdown()
            driver.close()
        assert not os.listdir(root)
"""
EXPECTED = {
    "order": True,
    "threads": [101, "1"],
    "title": True,
    "ready": True,
    "returns": ["a", "b"],
    "resolved": [[2, "1"], ["y", "b"]],
    "error": ["RayTaskError", "ValueError", "no"],
    "late": [["GetTimeoutError", "None"], [0, 1]],
    "opened": [True, [1, 0]],
    "array": "read-only",
    "asked": ["['y', 'b']", "6.0"],
    "met": "met",
    "awaited": 101,
    "named": [True, False],
    "died": "RayActorError",
    "later": "RayActorError",
}


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("local", marks=pytest.mark.processes),
        pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.cluster]),
    ],
)
def test_actors_do_the_same(which, tmp_path):
    log, program = tmp_path / "actors.log", tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, which, log],
        capture_output=True,
        text=True,
        timeout=deadline(120),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    said = log.read_text() if log.exists() else ""
    assert done.returncode == 0, done.stderr[-3000:] + said
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("FOUND")]
    assert json.loads(line.removeprefix("FOUND")) == EXPECTED, said
