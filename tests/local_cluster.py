"""A stand-in for Ray on one machine, whose processes are forked from one that has its imports.

`put_in_place` replaces what rlcore.cluster uses of Ray: actors of plain, threaded and asynchronous
classes, named actors, references, `get`, `put`, `wait` and `kill`. A process starts within
milliseconds; all else is as with Ray: each actor has a process of its own, what passes between two
is serialised, arrays arrive read-only, a call of a process that died raises RayActorError, and an
error of a call arrives as RayTaskError. Not there: restarts of a process (`max_restarts`),
resources, several nodes, Ray's own limits of memory.

The driver forks a nursery before it has threads. The nursery, which never has any, forks the
actors, and ends them when the driver ends. An actor listens on a Unix socket; every process that
calls it has one connection to it, on which calls keep their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import itertools
import os
import pickle
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import ray.util
from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from rlcore.cluster import placement

NODE = "0ca1" * 14  # id of the only node
FOLDER = "RLCORE_LOCAL_CLUSTER"  # variable: the folder of sockets, process ids, names and objects
PR_SET_PDEATHSIG = 1


# ---- processes -----------------------------------------------------------------------------------


class Forking:
    """A process that forks another one for each request, and never has threads itself."""

    def __init__(self, control: Connection) -> None:
        """`control`: brings requests and takes the process ids; its end is the end of all."""
        self.control = control
        self._children: dict[int, int] = {}  # file descriptor of a process -> its id

    def requests(self) -> Any:
        """Returns in every child, with its request; in this process never."""
        while True:
            for ready in wait_for_any([self.control, *self._children]):
                if ready is not self.control:
                    self._bury(ready)
                    continue
                try:
                    request = self.control.recv()
                except (EOFError, ConnectionResetError):
                    for descriptor in list(self._children):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        self._bury(descriptor)
                    os._exit(0)
                if self._fork(request) == 0:
                    return request

    def _fork(self, request: Any) -> int:
        self.conceived(request)
        pid = os.fork()
        if pid:
            self._children[os.pidfd_open(pid)] = pid
            self.born(pid, request)
            self.control.send((pid, None, 0.0))
            return pid
        self.control.close()
        for descriptor in self._children:
            os.close(descriptor)
        die_with_parent()
        random.seed()
        return 0

    def _bury(self, descriptor: int) -> None:
        os.close(descriptor)
        pid = self._children.pop(descriptor)
        _, status, used = os.wait4(pid, 0)
        self.died(pid, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)

    def conceived(self, request: Any) -> None:
        """Before the fork: what a child is to inherit."""

    def born(self, pid: int, request: Any) -> None:
        """After it, in this process."""

    def died(self, pid: int, code: int, cpu_s: float) -> None:
        """A child has ended; with the processor seconds of children that it waited for."""


def die_with_parent() -> None:
    """Have this process killed when the one that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class Birth:
    """What an actor is forked with."""

    path: str  # of its socket; the file .pid beside it lives as long as the process
    threads: int
    blob: bytes  # its class, settings and arguments
    log: str = os.devnull
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)
    listener: socket.socket | None = None


class Nursery(Forking):
    """Forks the actors of one driver."""

    def __init__(self, control: Connection) -> None:
        super().__init__(control)
        self._paths: dict[int, str] = {}

    def conceived(self, request: Birth) -> None:
        request.listener = socket.socket(socket.AF_UNIX)  # takes calls before the actor is there
        request.listener.bind(request.path)
        request.listener.listen(256)

    def born(self, pid: int, request: Birth) -> None:
        assert request.listener is not None
        request.listener.close()
        self._paths[pid] = request.path
        Path(f"{request.path}.pid").write_text(str(pid))

    def died(self, pid: int, code: int, cpu_s: float) -> None:
        for path in (f"{self._paths[pid]}.pid", self._paths.pop(pid)):
            Path(path).unlink(missing_ok=True)


class Driver:
    """The processes of a driver: `ray.init` and `ray.shutdown`, and what starts actors."""

    def __init__(self, root: str, log: str) -> None:
        self._root = root
        self._log = log
        self._lock = threading.Lock()

    def fork(self) -> None:
        """Start the nursery: before this process has threads."""
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            die_with_parent()
            os.setpgid(0, 0)  # signals to the driver's group are the driver's to act on
            title("local::nursery")
            Hosted(Nursery(Connection(theirs.detach())).requests()).run()
        theirs.close()
        self._nursery = Connection(ours.detach())

    def init(self, **_: Any) -> None:
        folder = os.environ[FOLDER] = tempfile.mkdtemp(dir=self._root)
        self._head = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._answer, args=(self._head,), daemon=True).start()
        assert len(folder) < 60  # paths of sockets are short

    def _answer(self, head: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                head.accept()[0].close()

    def address(self) -> str:
        """Where Ray's head would listen."""
        return f"127.0.0.1:{self._head.getsockname()[1]}"

    def spawn(self, birth: Birth) -> None:
        birth.log = self._log
        with self._lock:
            self._nursery.send(birth)
            self._nursery.recv()

    def shutdown(self) -> None:
        folder = os.environ.get(FOLDER)
        if folder is None:
            return
        self._head.close()
        for path in Path(folder).glob("*.pid"):
            kill(Handle(path.stem))
        until = time.monotonic() + 60
        while any(Path(folder).glob("*.pid")):  # the nursery removes them
            assert time.monotonic() < until, "a process that was killed did not end"
            time.sleep(0.005)
        shutil.rmtree(folder, ignore_errors=True)  # processes still remove their own
        del os.environ[FOLDER]

    def close(self) -> None:
        """End the nursery, whose processor time then counts as this process's."""
        self._nursery.close()
        os.waitpid(self._pid, 0)


def title(words: str) -> None:
    """What the process is called, as Ray's are by their actors."""
    import setproctitle

    setproctitle.setproctitle(words)


# ---- in an actor's process -----------------------------------------------------------------------


class Hosted:
    """An actor in this process: its calls, in threads by concurrency group or in an event loop."""

    def __init__(self, birth: Birth) -> None:
        assert birth.listener is not None
        self._listener = birth.listener
        os.environ.clear()
        os.environ.update(birth.environment)
        os.environ.setdefault("OMP_NUM_THREADS", str(birth.threads))
        os.chdir(birth.folder)
        output = os.open(birth.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._cls, settings, args = loads(birth.blob)
        title(f"ray::{self._cls.__name__}")
        threads = {"": settings.get("max_concurrency", 1)} | settings.get("concurrency_groups", {})
        self._pools = {group: ThreadPoolExecutor(n, group) for group, n in threads.items()}
        methods = (m for _, m in inspect.getmembers(self._cls))
        self._loop: asyncio.AbstractEventLoop | None = None
        if any(map(inspect.iscoroutinefunction, methods)):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._actor = self._cls(*args)

    def run(self) -> None:
        """Serve until the process is killed."""
        while True:
            link = Connection(self._listener.accept()[0].detach())
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: Connection) -> None:
        lock = threading.Lock()
        while True:
            try:
                call_id, name, args, given = loads(link.recv_bytes())
            except (EOFError, OSError):
                return
            self._begin(name, args, given).add_done_callback(
                lambda done, i=call_id, called=name: _reply(link, lock, i, called, done)
            )

    def _begin(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Future[Any]:
        if name == "__ray_ready__":
            return self._pools[""].submit(lambda: True)
        method = getattr(self._actor, name)
        if self._loop is not None:
            return asyncio.run_coroutine_threadsafe(method(*args, **given), self._loop)
        group = getattr(method, "__ray_concurrency_group__", "")
        return self._pools[group].submit(method, *args, **given)


def _reply(
    link: Connection, lock: threading.Lock, call_id: int, name: str, done: Future[Any]
) -> None:
    error = done.exception()
    try:
        answer = dumps((call_id, error, done.result() if error is None else _trace(error)))
    except Exception as e:  # what was returned or raised cannot be pickled
        answer = dumps((call_id, RuntimeError(f"{name}: {error or e}"), ""))
    with lock, contextlib.suppress(OSError):  # who asked may be gone
        link.send_bytes(answer)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# ---- in a process that calls ---------------------------------------------------------------------


class Ref:
    """A reference: the answer of a call of this process, or an object that `put` wrote to a file.
    Only the latter travels."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # who stops waiting does not cancel it
        if path:
            self.future.set_result(None)

    def value(self) -> Any:
        """Of one that is done."""
        return loads(Path(self.path).read_bytes()) if self.path else self.future.result()

    def __await__(self) -> Any:
        yield from asyncio.wrap_future(self.future).__await__()
        return self.value()

    def __reduce__(self) -> Any:
        if not self.path:
            raise TypeError("the answer of a call travels as an argument by itself")
        return Ref, (self.path,)


class Link:
    """This process's connection to an actor."""

    def __init__(self, path: str) -> None:
        self._waiting: dict[int, tuple[str, list[Ref]]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(path)
        except OSError:  # it has died
            return
        self._connection = Connection(client.detach())
        threading.Thread(target=self._receive, args=(self._connection,), daemon=True).start()

    def call(
        self, name: str, args: Sequence[Any], given: Mapping[str, Any], refs: list[Ref]
    ) -> None:
        with self._lock:
            if self._connection is None:
                return _die(refs, name)
            call_id = next(self._ids)
            self._waiting[call_id] = name, refs
            with contextlib.suppress(OSError):  # the thread that receives sees it
                self._connection.send_bytes(dumps((call_id, name, args, given)))

    def _receive(self, connection: Connection) -> None:
        while True:
            try:
                call_id, error, value = loads(connection.recv_bytes())
            except (EOFError, OSError):
                break
            name, refs = self._waiting.pop(call_id)
            if error is not None:
                error = RayTaskError(name, value, error).as_instanceof_cause()
                for ref in refs:
                    ref.future.set_exception(error)
            else:
                for ref, part in zip(refs, value if len(refs) > 1 else [value], strict=True):
                    ref.future.set_result(part)
        with self._lock:
            self._connection = None
            for name, refs in self._waiting.values():
                _die(refs, name)


def _die(refs: Sequence[Ref], name: str) -> None:
    for ref in refs:
        ref.future.set_exception(ActorDiedError())


links: dict[str, Link] = {}  # of this process, by the actor's id
links_lock = threading.Lock()


class Handle:
    """An actor, wherever it is used."""

    def __init__(self, actor: str) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_") and name != "__ray_ready__":
            raise AttributeError(name)
        return Method(self, name)

    def __reduce__(self) -> Any:
        return Handle, (self._actor,)

    @property
    def _actor_id(self) -> Any:
        return SimpleNamespace(hex=lambda: self._actor)

    def _link(self) -> Link:
        with links_lock:
            if self._actor not in links:
                links[self._actor] = Link(_path(self._actor))
            return links[self._actor]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of an actor."""

    handle: Handle
    name: str
    returns: int = 1

    def options(self, num_returns: int) -> Method:
        return Method(self.handle, self.name, num_returns)

    def remote(self, *args: Any, **given: Any) -> Any:
        refs = [Ref() for _ in range(self.returns)]
        awaited = [a for a in args if isinstance(a, Ref)]
        if all(a.future.done() for a in awaited):
            self._send(args, given, refs)
        else:  # as with Ray, the call goes out once its arguments are there
            threading.Thread(target=self._send, args=(args, given, refs), daemon=True).start()
        return refs[0] if self.returns == 1 else refs

    def _send(self, args: Sequence[Any], given: Mapping[str, Any], refs: list[Ref]) -> None:
        try:
            wait([a.future for a in args if isinstance(a, Ref)])
            values = [a.value() if isinstance(a, Ref) else a for a in args]
        except RayError as e:
            for ref in refs:
                ref.future.set_exception(e)
            return
        self.handle._link().call(self.name, values, given, refs)


def _path(actor: str) -> str:
    return f"{os.environ[FOLDER]}/{actor}"


def dumps(value: Any) -> bytes:
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.dumps((body, [bytes(b.raw()) for b in buffers]))


def loads(blob: bytes) -> Any:
    body, buffers = pickle.loads(blob)
    return pickle.loads(body, buffers=buffers)  # of bytes: arrays cannot be written to


# ---- in place of Ray -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActorClass:
    """What `ray.remote(**settings)` makes of a class."""

    driver: Driver
    plain: type
    settings: dict[str, Any]

    def options(self, **settings: Any) -> ActorClass:
        return ActorClass(self.driver, self.plain, self.settings | settings)

    def remote(self, *args: Any) -> Handle:
        actor = secrets.token_hex(8)
        if "name" in self.settings:
            os.symlink(actor, _path(f"{self.settings['name']}.name"))
        threads = max(1, int(self.settings.get("num_cpus", 1)))  # as Ray sets OMP_NUM_THREADS
        self.driver.spawn(Birth(_path(actor), threads, dumps((self.plain, self.settings, args))))
        return Handle(actor)


def get(refs: Any, timeout: float | None = None) -> Any:
    several = refs if isinstance(refs, list) else [refs]
    done, waiting = wait([r.future for r in several], timeout, FIRST_EXCEPTION)
    for future in done:
        if error := future.exception():
            raise error
    if waiting:
        raise GetTimeoutError(f"no answer within {timeout} s")
    values = [ref.value() for ref in several]
    return values if isinstance(refs, list) else values[0]


def put(value: Any) -> Ref:
    path = _path(f"{secrets.token_hex(8)}.object")
    Path(path).write_bytes(dumps(value))
    return Ref(path)


def wait_for(
    refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Ref], list[Ref]]:
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        done = [r for r in refs if r.future.done()][:num_returns]
        left = None if until is None else until - time.monotonic()
        if len(done) >= num_returns or (left is not None and left <= 0):
            return done, [r for r in refs if r not in done]
        wait([r.future for r in refs if not r.future.done()], left, "FIRST_COMPLETED")


def kill(actor: Handle, *, no_restart: bool = True) -> None:
    with contextlib.suppress(OSError):  # it has died
        os.kill(int(Path(f"{_path(actor._actor)}.pid").read_text()), signal.SIGKILL)


def get_actor(name: str) -> Handle:
    try:
        actor = os.readlink(_path(f"{name}.name"))
    except OSError:
        actor = ""
    if not actor or not os.path.exists(_path(actor)):
        raise ValueError(f"there is no actor {name}")
    return Handle(actor)


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """There is always room."""

    bundle_specs: list[dict[str, float]]
    strategy: str

    def wait(self, timeout_s: float) -> bool:
        return True


def put_in_place(root: str, log: str) -> Driver:
    """Make rlcore.cluster use the stand-in in this process and in those that it starts. Once,
    before the process has threads.

    `root`: a folder with a short path, for sockets. `log`: file to which actors write what they
    print.
    """
    driver = Driver(root, log)
    replaced: dict[str, Any] = {
        "init": driver.init,
        "shutdown": driver.shutdown,
        "remote": lambda **settings: lambda plain: ActorClass(driver, plain, settings),
        "get": get,
        "put": put,
        "wait": wait_for,
        "kill": kill,
        "get_actor": get_actor,
        "nodes": lambda: [{"NodeID": NODE, "Alive": True, "Resources": {}}],
        "get_runtime_context": lambda: SimpleNamespace(
            get_node_id=lambda: NODE,
            gcs_address=driver.address() if hasattr(driver, "_head") else "",
            was_current_actor_reconstructed=False,
        ),
    }
    for name, value in replaced.items():
        setattr(ray, name, value)
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    placement.placement_group = PlacementGroup
    driver.fork()
    return driver
