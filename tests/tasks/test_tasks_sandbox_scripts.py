"""Programs that read and print have the processes that the interpreter gives them."""

import ast
import os
import subprocess
import sys

import pytest
from timing import deadline

from rlcore.graders.sandbox import LAYERS, Limits, ProgramTests, Sandbox, SandboxError

pytestmark = pytest.mark.processes
GIVEN = "2\n4 5\n"
READ = "a = list(map(int, open(0).read().split()))[1:]\n"
ADD = f"{READ}print(sum(a))"
# Each is run by the interpreter too: what that prints is right.
IDIOMS = {
    "paths of streams": "print(open('/dev/stdin').read(), file=open('/dev/stdout', 'a'))",
    "numbers of streams": "print(open('/proc/self/fd/0').read() == open('/dev/fd/0').read())",
    "fileinput": "import fileinput\nprint(' '.join(fileinput.input()).split())",
    "arguments": "import sys\nprint(sys.argv, sys.orig_argv[1:], __file__ and sys.path[0] == '')",
    "own file": "import os\nprint(open(__file__).readline())\n"
    "print(os.path.dirname(__file__) == os.getcwd())",
    "exit hooks": "import atexit\natexit.register(print, 1)\natexit.register(print, 2)\nprint(0)",
    "closed": f"import sys\n{ADD}\nsys.stdout.close()",
    "closed descriptor": f"import os, sys\n{ADD}\nsys.stdout.flush()\nos.close(1)",
    "unflushed end": f"import os\n{ADD}\nos._exit(0)",
    "flushed end": f"import os\n{READ}print(sum(a), flush=True)\nos._exit(0)",
    "daemon": "import threading, time\ndef idle():\n    while True: time.sleep(.1)\n"
    f"threading.Thread(target=idle, daemon=True).start()\n{ADD}",
    "busy daemon": "import threading\ndef spin():\n    while True: pass\n"
    f"threading.Thread(target=spin, daemon=True).start()\n{ADD}",
    "late thread": "import threading\nthreading.Timer(.05, print, ('late',)).start()\nprint(1)",
    "executor": "from concurrent.futures import ThreadPoolExecutor\n"
    "ThreadPoolExecutor(2).submit(print, 'done')",
    "pool": "from multiprocessing.pool import ThreadPool\n"
    f"{READ}with ThreadPool(2) as p: print(sum(p.map(int, a)))",
    "lock": "import multiprocessing\nwith multiprocessing.Lock(): print(input())",
    "deep recursion": "import sys, threading\nsys.setrecursionlimit(10**6)\n"
    "threading.stack_size(1 << 26)\ndef f(n): return n and 1 + f(n - 1)\n"
    "t = threading.Thread(target=lambda: print(f(20000)))\nt.start()",
    "own module": f"import sys, __main__\n{READ}def f(): return sum(a)\n"
    "print(sys.modules[__name__].f(), __main__.f(), f.__module__)",
    "pickle": "import copy, enum, pickle\nclass P: x = 1\nE = enum.Enum('E', 'A')\n"
    "print(pickle.loads(pickle.dumps((P(), E.A)))[1], copy.deepcopy(P()).x, P)",
    "deleted stream": f"import sys\n{ADD}\nout = sys.stdout\ndel sys.stdout\nout.write('x')",
    "library that prints": "import ctypes\nctypes.CDLL(None).printf(b'4')",
    "builtins": "print(__builtins__.sorted, callable(help), callable(exit))",
    "ends in a thread": f"import sys, threading\nt = threading.Thread(target=sys.exit, args=(3,))\n"
    f"t.start()\nt.join()\n{ADD}",
    "carriage returns": ADD.replace("\n", "\r\n"),
    "annotations": "from __future__ import annotations\nimport dataclasses, pickle, typing\n"
    "@dataclasses.dataclass(slots=True)\nclass N:\n    n: N | None = None\n"
    "print(pickle.loads(pickle.dumps(N(N()))), typing.get_type_hints(N))",
    "many threads": "from multiprocessing.dummy import Pool\nprint(sum(Pool(16).map(int, '123')))",
    "names": "print(sorted(globals()), __name__, __doc__, __package__, __spec__)",
    "original streams": f"import sys\n{READ}sys.__stdout__.write(str(sum(a)))",
    "in memory": "import sys, io\nsys.stdout = io.StringIO()\nprint('x')\n"
    "sys.__stdout__.write(sys.stdout.getvalue())",
    "own stream": "import sys, io\nsys.stdout = io.TextIOWrapper(io.FileIO(1, 'w'))\nprint('x')",
    "detached": "import sys, codecs\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach())\n"
    "print('\u00e9')",
    "file that stays open": f"{READ}out = open(1, 'w')\nout.write(str(sum(a)))",
    "fast output": "import atexit, io, os, sys\nsys.stdin = io.BytesIO(os.read(0, 9999))\n"
    "sys.stdout = out = io.StringIO()\n"
    "atexit.register(lambda: os.write(1, out.getvalue().encode()))\n"
    "print(sys.stdin.readline())",
    "event loop": "import asyncio\nasync def go():\n    await asyncio.sleep(.01)\n"
    "    print(await asyncio.get_running_loop().run_in_executor(None, input))\nasyncio.run(go())",
    "byte order mark": f"\ufeff{ADD}",
    "deleted": "class A:\n    def __init__(self): self.me = self\n"
    "    def __del__(self): print('del')\na = A()\nprint('end')",
    "generator": "def g():\n    try: yield\n    finally: print('closed')\nx = g()\nnext(x)",
    "ends": "print(1)\nexit()",
    "ends as failed": "print(1)\nexit(3)",
    "ends with a text": "raise SystemExit('text')",
    "raises": "print(1)\n1 / 0",
    "is not Python": "print(1",
    "killed": "import os\nprint(1, flush=True)\nos.kill(os.getpid(), 9)",
    "streams": "import os, sys\nprint(sys.stdin.fileno(), sys.stdout.fileno(), sys.stdin.isatty(), "
    "sys.stdout.encoding, sys.stdin.name, os.fstat(0).st_size)",
    "seeks": "import sys\nx = sys.stdin.read()\nsys.stdin.seek(0)\nprint(sys.stdin.read() == x)",
    "mapped": "import mmap\nprint(mmap.mmap(0, 0, prot=mmap.PROT_READ).readline())",
    "own files": "open('m.py', 'w').write('x = 4')\nimport m\nprint(m.x)",
    "alarm": "import signal, time\nsignal.signal(14, lambda *a: print('alarm'))\n"
    "signal.setitimer(signal.ITIMER_REAL, .01)\ntime.sleep(.1)",
    "end of input": "try:\n    while True: print(input())\nexcept EOFError: print('end')",
}


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(Limits(timeout_s=deadline(20), memory_mib=256, file_mib=8))
    yield box
    box.close()


def printed(sandbox, program, *given, shown="found"):
    """What it prints for each input, None where it fails."""
    tests = (
        "from sandbox.outputs import Failed\nfound = []\n"
        f"for given in {given!r}:\n"
        "    try: found.append(answer(given))\n"
        "    except Failed: found.append(None)\n"
        f"raise LookupError(repr({shown}))"
    )
    outcome = sandbox.run(program, ProgramTests(tests, script=True))
    kind, _, found = outcome.why.partition(": ")
    assert kind == "LookupError", outcome
    return ast.literal_eval(found)


def interpreted(folder, program):
    (folder / "main.py").write_text(program)
    (folder / "given").write_text(GIVEN)
    with open(folder / "given") as given, open(folder / "printed", "w") as output:
        ended = subprocess.run(
            [sys.executable, "main.py"],
            cwd=folder,
            env={"LANG": "C.UTF-8"},
            stdin=given,
            stdout=output,
            stderr=subprocess.DEVNULL,
            timeout=deadline(60),
        )
    return None if ended.returncode else (folder / "printed").read_text()


def test_idioms_print_what_the_interpreter_has_them_print(sandbox, tmp_path):
    for name, program in IDIOMS.items():
        folder = tmp_path / name
        folder.mkdir()
        right = interpreted(folder, program)  # a later run has the code of the first
        found = printed(sandbox, program, GIVEN, GIVEN, shown="list(dict.fromkeys(found))")
        assert (name, found) == (name, [right])


def test_a_run_leaves_nothing_to_the_next(sandbox):
    count = "import os, sys, builtins\nprint(sorted(os.listdir()), hasattr(builtins, 'x'))\n"
    clean = "['.stdin', '.stdout', 'main.py'] False\n"
    leave = [
        "builtins.x = 1",
        "open('kept', 'w').write('x')",
        "os.mkdir('kept')",
        "while True:\n    os.mkdir('d')\n    os.chdir('d')",
        "os.remove('.stdout')\nos.mkdir('.stdout')",
        "os.rename('.stdin', 'main.py')\nos.link('main.py', 'kept')",
        "for i in range(2000): open(str(i), 'w')",
    ]
    for what in leave:
        program = f"{count}sys.stdout.flush()\ntry:\n    " + what.replace("\n", "\n    ")
        assert printed(sandbox, f"{program}\nexcept OSError: pass", "", "") == [clean, clean]


def test_a_link_in_the_place_of_a_stream_leads_nowhere(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    # the filter lets a program make none, and not every machine has the filter
    box = Sandbox(Limits(timeout_s=deadline(20)), layers=[x for x in LAYERS if x != "seccomp"])
    try:
        for name in (".stdin", ".stdout", "main.py"):
            link = f"import os\nos.remove({name!r})\nos.symlink({str(victim)!r}, {name!r})\n"
            assert printed(box, f"{link}print(input())", "a", "b") == ["a\n", "b\n"]
    finally:
        box.close()
    assert victim.read_text() == "whole"


def test_a_run_has_its_streams_and_no_other_descriptor(sandbox):
    program = (
        "import os\n"
        "def held(fd):\n    try: os.fstat(fd)\n    except OSError: return False\n    return True\n"
        "print([fd for fd in range(64) if held(fd)])"
    )
    assert printed(sandbox, program, "", "") == ["[0, 1, 2]\n"] * 2


def test_the_limits_hold_for_all_runs_together(sandbox):
    box = Sandbox(Limits(timeout_s=1, memory_mib=256))
    tests = ProgramTests("for _ in range(9): answer('')", script=True)
    try:
        spin = "import time\nwhile time.process_time() < .4: pass"
        for program in (spin, "import time\ntime.sleep(99)", "while True: pass"):
            assert box.run(program, tests).why == "time limit of 1 s"
        assert "limit of 1 s" in box.run("import os\nos.read(os.pipe()[0], 1)", tests).why
        assert "MemoryError" in box.run("x = bytes(1 << 29)", tests).output
        assert "output" in box.run("import sys\nwhile 1: sys.stderr.write('x' * 999)", tests).why
    finally:
        box.close()
    threads = "import threading, time\nthreading.stack_size(1 << 18)\n"
    threads += "for _ in range(80): threading.Thread(target=time.sleep, args=(99,)).start()"
    assert sandbox.run(threads, tests).why == "more than 64 threads"


def test_without_its_own_file_system_a_program_still_reads_and_prints():
    box = Sandbox(Limits(timeout_s=deadline(10)), layers=["limits", "capabilities", "landlock"])
    try:
        assert printed(box, ADD, GIVEN, "1\n-3\n") == ["9\n", "-3\n"]
        write = "import os\ntry: open('x', 'w')\nexcept OSError: print('refused')"
        assert printed(box, write, "") == ["refused\n"]
    finally:
        box.close()


def test_a_run_that_is_not_confined_is_no_verdict():
    box = Sandbox(Limits(), layers=["limits", "capabilities"])
    try:
        os.rmdir(box._folder.name)  # which a child enters
        with pytest.raises(SandboxError, match="before it was confined"):
            box.run(ADD, ProgramTests("answer('')", script=True))
    finally:
        box.close()
