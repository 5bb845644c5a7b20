"""Programs that read standard input and print: each run is a separate process.

A runner, which the server forks for one program, forks a confined child for every input that the
judge sends. The child becomes what `python main.py <input >output` is: descriptors 0 and 1 are
files, `__main__` is a real module, and its end is an interpreter's. The runner runs nothing of the
program. It reads the output when the child has ended, so that nothing which a program does to its
descriptors, streams or process takes part in a verdict. It has no expected output.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import marshal
import os
import signal
import sys
import traceback
import types
from _thread import _count as live_threads
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

from .clock import Tally, delay
from .confinement import LIBC, PR_SET_PDEATHSIG
from .program import SCRIPT
from .values import Channel, Closed

MOST_OUTPUT = 4 << 20  # bytes of one run
STDIN, STDOUT = ".stdin", ".stdout"  # in the program's folder, with its source
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
IDLE: dict[str, Any] = {"value": {}}
DONE = b"\0complete"
FLUSH_FAILED = 120  # the interpreter's exit code, then


class Folder:
    """The program's folder, as the runner sees it and as the program does (`inside`).

    at: None without its own file system, where the streams have no names. renew: empties the
    folder whatever is in it.
    """

    def __init__(self, at: str | None, inside: str, renew: Callable[[], None]) -> None:
        self._at = at
        self._inside = inside
        self._renew = renew

    @property
    def program(self) -> str:
        """The program's path, as it sees it."""
        return os.path.join(self._inside, SCRIPT)

    def streams(self, source: bytes, given: bytes) -> tuple[int, int]:
        """Descriptors of a run's input and output. Raises OSError if they have no room."""
        if self._at is None:
            return _filled(os.memfd_create(STDIN), given), os.memfd_create(STDOUT)
        self._clear()
        os.close(_filled(self._new(SCRIPT), source))
        os.close(_filled(self._new(STDIN), given))
        # another description of it, which may only read
        return os.open(self._path(STDIN), os.O_RDONLY | os.O_NOFOLLOW), self._new(STDOUT)

    def _path(self, name: str) -> str:
        return os.path.join(self._at or "", name)

    def _new(self, name: str) -> int:
        return os.open(self._path(name), NEW, 0o600)

    def _clear(self) -> None:
        """Remove what the last run left."""
        left = os.listdir(self._at)
        try:
            for name in left:
                os.unlink(self._path(name))  # a link itself, not what it leads to
        except OSError:  # a folder
            self._renew()


def _filled(fd: int, data: bytes) -> int:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Runner:
    """Serves the judge's requests to run one program. enter: confines a child for good."""

    def __init__(
        self, channel: Channel, folder: Folder, tally: Tally, enter: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._folder = folder
        self._tally = tally
        self._enter = enter
        self._cpu_s = 0.0
        self._delay_s = 0.0

    def serve(self) -> None:
        """Raises Closed when the judge has ended."""
        self._channel.send("waiting")
        source, _, _ = self._channel.receive()
        code = Code(source, self._folder.program)
        self._channel.send("ready")
        while True:
            verb, *arguments = self._channel.receive()
            # after its last run the judge asks whether this process lives, as it does others
            self._channel.send(self._answer(code, *arguments) if verb == "answer" else IDLE)

    def _answer(self, code: Code, text: str) -> dict[str, Any]:
        """{"value": output}; {"failed": why} for a run that fails; {"fault": why} for one that
        could not be confined."""
        source, sent = (t.encode(errors="surrogatepass") for t in (code.source, text))
        try:
            given, output = self._folder.streams(source, sent)
        except OSError as error:
            return {"failed": f"its input cannot be given: {error.strerror}"}
        try:
            ended = self._run(code, given, output)
            code.take()
            size = os.fstat(output).st_size
            if not self._tally.marked():
                return {"fault": "the program's process ended before it was confined"}
            if ended < 0:
                return {"failed": f"killed by {_signal(-ended)}"}
            if ended:
                return {"failed": f"exit code {ended}"}
            if size > MOST_OUTPUT:
                return {"failed": f"more than {MOST_OUTPUT} bytes of output"}
            return {"value": os.pread(output, MOST_OUTPUT, 0).decode(errors="replace")}
        finally:
            os.close(given)
            os.close(output)

    def _run(self, code: Code, given: int, output: int) -> int:
        """The exit code of one run, or minus the signal that ended it."""
        runner = os.getpid()
        pid = os.fork()
        if not pid:
            self._become(runner, code, given, output)
        self._tally.write(pid, self._cpu_s, self._delay_s)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._delay_s += delay(pid)  # while its number is still its own
        self._tally.write(0, self._cpu_s, self._delay_s)
        _, status, used = os.wait4(pid, 0)
        self._cpu_s += used.ru_utime + used.ru_stime
        self._tally.write(0, self._cpu_s, self._delay_s)
        return os.waitstatus_to_exitcode(status)

    def _become(self, runner: int, code: Code, given: int, output: int) -> NoReturn:
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != runner:  # it died before the signal was asked for
                os._exit(1)
            os.dup2(given, 0)
            os.dup2(output, 1)
            for fd in (given, output, self._channel.fd):
                os.close(fd)
            self._enter()
            self._tally.mark()
            self._tally.close()
            finish(run_main(code, self._folder.program))
        except BaseException:  # it must not go on as a second runner
            traceback.print_exc()
        finally:
            os._exit(1)


class Code:
    """A program's code, which its first run compiles and the others get from it.

    It is data to the runner: what compiles it or makes it an object again is confined.
    """

    def __init__(self, source: str, path: str) -> None:
        self.source = source
        self._path = path
        self._file: int | None = os.memfd_create("code")
        self._compiled = b""

    def load(self) -> types.CodeType:
        """The code, in a run. Raises what `compile` does."""
        if self._file is None:
            return marshal.loads(self._compiled)
        try:
            text = self.source.removeprefix("\ufeff")
            code = compile(text, self._path, "exec", dont_inherit=True)
            with contextlib.suppress(OSError, ValueError):  # no room: the next run compiles it
                os.lseek(self._file, 0, os.SEEK_SET)
                _filled(self._file, marshal.dumps(code) + DONE)
            return code
        finally:
            os.close(self._file)

    def take(self) -> None:
        """Keep what a run, which has ended, has compiled."""
        if self._file is None:
            return
        found = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if found.endswith(DONE):
            self._compiled = found.removesuffix(DONE)
            os.close(self._file)
            self._file = None


def run_main(code: Code, path: str) -> int:
    """Run a program as the interpreter runs the file that it is given; its exit code so far."""
    main = types.ModuleType("__main__")
    main.__loader__ = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    try:
        exec(code.load(), vars(main))
    except SystemExit as ended:
        return _exit_code(ended.code)
    except BaseException as error:
        while (trace := error.__traceback__) and trace.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = trace.tb_next  # without the frames of this module
        _survive(sys.excepthook, type(error), error, error.__traceback__)
        return 1
    return 0


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    _survive(print, code, file=sys.stderr)
    return 1


def _survive(function: Callable[..., object], *arguments: object, **keywords: Any) -> bool:
    """Call it, and return whether it raised nothing."""
    try:
        function(*arguments, **keywords)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        return False
    return True


def finish(code: int) -> NoReturn:
    """End this process as the interpreter ends: wait for threads, run the exit hooks, write what
    streams hold, delete the program's objects.

    Only what the program made is deleted, since deleting the interpreter's own modules in every
    run takes longer than most programs. Threads that still run must be stopped first, which only
    the interpreter can do: then it ends itself.
    """
    if "threading" in sys.modules:
        _survive(lambda: sys.modules["threading"]._shutdown())
    _survive(atexit._run_exitfuncs)
    if not _flush():
        code = FLUSH_FAILED
    if live_threads():
        ctypes.pythonapi.Py_Exit(code)
    sys.modules.pop("__main__", None)
    _survive(gc.collect)  # files close, objects have their last word
    _flush()
    LIBC.fflush(None)  # of libraries that print by themselves
    os._exit(code)


def _flush() -> bool:
    """Write what the streams hold; False if one that is in use could not."""
    whole = True
    for stream in (getattr(sys, name, None) for name in ("stdout", "stderr")):
        if stream is not None and not getattr(stream, "closed", False):
            whole = _survive(stream.flush) and whole
    if sys.__stdout__ is not getattr(sys, "stdout", None):
        with contextlib.suppress(Exception):  # closed, or without its descriptor
            sys.__stdout__.flush()  # type: ignore[union-attr]
    return whole


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def main(channel: Channel, folder: Folder, tally: Tally, enter: Callable[[], None]) -> NoReturn:
    """Run a runner's process from start to end."""
    sys.path.insert(0, os.path.dirname(folder.program))
    # opened at this process's start, on descriptors that were other files'; lines may end in CR LF
    sys.stdin.reconfigure(newline=None)  # type: ignore[union-attr]
    try:
        Runner(channel, folder, tally, enter).serve()
    except Closed:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
