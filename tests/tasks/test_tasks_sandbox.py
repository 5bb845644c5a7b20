"""Programs that try to break out of the sandbox, for real, and the tasks that run programs in
it."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from timing import deadline, wait_for_end

from rlcore.errors import UserError
from rlcore.graders.sandbox import LAYERS, Limits, Sandbox, SandboxError
from rlcore.graders.sandbox.clock import Clock, Tally
from rlcore.graders.sandbox.confinement import CALLS
from rlcore.graders.sandbox.server import LATE
from rlcore.tasks import make_task

pytestmark = pytest.mark.processes

# A program runs every attempt; one that succeeds is printed, and the program then fails.
ATTEMPTS = """
import ctypes, os, signal, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)

def syscall(*args):
    if libc.syscall(*args) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def blocked(*attempts):
    escaped = []
    for number, attempt in enumerate(attempts):
        try:
            attempt()
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            continue
        escaped.append(number)
    assert not escaped, f"attempts that succeeded: {escaped}"
"""


@pytest.fixture(scope="module")
def sandbox():
    # A time limit that only a program which never ends can reach, however busy the machine is.
    box = Sandbox(Limits(timeout_s=deadline(20), memory_mib=256, file_mib=4, output_kib=64))
    assert box.run("").passed  # its judge starts with the first program
    yield box
    assert box.run("print(1)").passed  # still in order after everything
    box.close()


@pytest.fixture(scope="module")
def hasty():
    box = Sandbox(Limits(timeout_s=1))  # CPU seconds: the same however busy the machine is
    assert box.run("").passed
    yield box
    box.close()


def blocked(sandbox, *attempts):
    calls = "".join(f"    lambda: {a},\n" for a in attempts)
    outcome = sandbox.run(f"{ATTEMPTS}\nblocked(\n{calls})")
    assert outcome.passed, outcome


def test_an_honest_program_runs(sandbox):
    program = (
        "import threading, json, hashlib, dataclasses, decimal, os, tempfile\n"
        "with open('notes.txt', 'w') as f:\n    f.write('x' * 1000)\n"
        "with tempfile.NamedTemporaryFile() as f:\n    f.write(b'y')\n"
        "t = threading.Thread(target=print, args=('from a thread',))\nt.start()\nt.join()\n"
        "answer = sum(map(len, os.listdir('.')))\n"
    )
    outcome = sandbox.run(program, "assert answer == 9", ["answer"])
    assert outcome.passed and outcome.why == "" and outcome.output == "from a thread\n"
    # no program finds the files of another
    assert sandbox.run("import os; assert os.listdir('.') == []").passed


@pytest.mark.parametrize(
    ("program", "why", "output"),
    [
        ("assert 1 == 2", "exit code 1", "AssertionError"),
        ("def f(:", "exit code 1", "SyntaxError"),
        ("import os; os._exit(0)", "exit code 0 before the end of its tests", ""),
        ("raise SystemExit(0)", "exit code 1", "SystemExit"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV", ""),
    ],
)
def test_a_program_that_does_not_reach_its_end_has_not_passed(sandbox, program, why, output):
    outcome = sandbox.run(program)
    assert not outcome.passed and why in outcome.why and output in outcome.output


def test_no_new_processes(sandbox):
    blocked(
        sandbox,
        "os.fork()",
        "os.forkpty()",
        "subprocess.run(['/bin/true'])",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "syscall(57)",  # fork
        "syscall(58)",  # vfork
        "syscall(56, 17, 0, 0, 0, 0)",  # clone without threads
        "syscall(435, bytes(88), 88)",  # clone3
        "syscall(0x40000000 + 57)",  # fork, x32
        "syscall(272, 0x10000000)",  # unshare
    )


def test_a_fork_bomb_makes_no_process(hasty):
    before = len(psutil.Process().children(recursive=True))
    outcome = hasty.run(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    )
    assert outcome.why.startswith("time limit of")
    assert len(psutil.Process().children(recursive=True)) == before


def test_a_thread_bomb_ends_with_its_program(sandbox):
    before = len(psutil.Process().children(recursive=True))
    program = (
        "import threading, time\nthreading.stack_size(1 << 15)\n"
        "for _ in range({}):\n"
        "    try:\n        threading.Thread(target=time.sleep, args=({},), daemon=True).start()\n"
        "    except RuntimeError:\n        break\n"  # memory ended before anyone looked
        "time.sleep({})"
    )
    outcome = sandbox.run(program.format(2000, 60, 60))
    assert outcome.why == "more than 64 threads"  # long before the time limit
    assert sandbox.run(program.format(50, 0.5, 0.5)).passed
    assert len(psutil.Process().children(recursive=True)) == before


def test_memory_is_bounded(sandbox):
    outcome = sandbox.run("hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 20))")
    assert not outcome.passed and "MemoryError" in outcome.output
    blocked(
        sandbox,
        "__import__('resource').setrlimit(9, (1 << 40, 1 << 40))",
        "__import__('resource').prlimit(os.getppid(), 9, (1 << 40, 1 << 40))",
        "os.memfd_create('x')",
        "syscall(29, 0, 1 << 30, 0o1600)",  # shmget
    )


def test_the_environment_and_files_of_others_cannot_be_read(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "do-not-tell")
    (tmp_path / "secret").write_text("do-not-tell")
    own = Sandbox(Limits(timeout_s=deadline(5)))
    try:
        outcome = own.run("import os; print(sorted(os.environ))")
        names = ["HOME", "LANG", "MALLOC_ARENA_MAX", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR"]
        assert outcome.output.strip() == str(names)
        blocked(
            own,
            f"open('/proc/{os.getpid()}/environ').read()",
            "open(f'/proc/{os.getppid()}/environ').read()",
            "open('/proc/self/environ').read()",
            "os.listdir('/proc')",
            f"open({str(tmp_path / 'secret')!r}).read()",
            f"os.symlink({str(tmp_path / 'secret')!r}, 'link') or open('link').read()",
            "open('/etc/passwd').read()",
            "os.listdir(os.path.expanduser('~root'))",
            f"syscall(101, 16, {os.getpid()}, 0, 0)",  # ptrace attach
            f"syscall(310, {os.getpid()}, 0, 0, 0, 0, 0)",  # process_vm_readv
            f"syscall(434, {os.getpid()}, 0)",  # pidfd_open
        )
    finally:
        own.close()


def test_paths_of_the_machine_do_not_exist_for_a_program(sandbox, tmp_path):
    here = [
        str(tmp_path),
        __file__,
        "/etc/passwd",
        "/proc/self/maps",
        "/home",
        "/root/.ssh",
        "/var",
    ]
    outcome = sandbox.run(
        f"import os\nfound = [p for p in {here!r} if os.path.lexists(p) or os.access(p, 0)]\n"
        "assert not found, found\n"
        "assert os.path.isfile('/dev/null') is False and os.path.exists('/dev/null')\n"
        "import numpy, json, ctypes, zoneinfo; zoneinfo.ZoneInfo('Europe/Paris')\n"
        "open('mine', 'w').write('x'); assert os.listdir(os.getcwd()) == ['mine']"
    )
    assert outcome.passed, outcome


def test_nothing_outside_can_be_changed(sandbox, tmp_path):
    target = tmp_path / "precious"
    target.write_text("precious")
    before = target.stat()
    path = str(target)
    blocked(
        sandbox,
        f"open({path!r}, 'w')",
        f"open({path!r}, 'a')",
        f"os.truncate({path!r}, 0)",
        f"os.unlink({path!r})",
        f"os.rename({path!r}, 'mine')",
        f"os.link({path!r}, 'mine')",
        f"os.chmod({path!r}, 0o777)",
        f"os.chown({path!r}, 1, 1)",
        f"os.utime({path!r}, (1, 1))",
        f"os.setxattr({path!r}, 'user.x', b'1')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.mkdir({str(tmp_path / 'new')!r})",
        f"os.mkfifo({str(tmp_path / 'new')!r})",
        "open('../beside', 'w')",
        "open('/tmp/x', 'w')",
        "os.chroot('.')",
        "syscall(165, b'x', b'.', b'tmpfs', 0, 0)",  # mount
    )
    own = "def f(): return open('/dev/shm/rlcore-own', 'w').write('x')"
    assert sandbox.run(own, "assert f() == 1", ("f",)).passed  # of its own folder
    assert not os.path.exists("/dev/shm/rlcore-own")
    after = target.stat()
    assert target.read_text() == "precious" and os.listdir(tmp_path) == ["precious"]
    assert (before.st_mode, before.st_mtime_ns, before.st_uid) == (
        after.st_mode,
        after.st_mtime_ns,
        after.st_uid,
    )


def test_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0rlcore-{os.getpid()}")
        unix.listen()
        blocked(
            sandbox,
            f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 1)",
            f"socket.socket(socket.AF_UNIX).connect('\\0rlcore-{os.getpid()}')",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socketpair(socket.AF_INET)",
            "socket.socketpair()[0].sendto(b'.', '\\0rlcore')",
            "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'.', 'x')",
            "socket.socketpair()[0].sendmsg([b'.'])",
            "socket.socketpair()[0].recvmsg(1)",
            "socket.getaddrinfo('localhost', 80) and socket.create_server(('', 0))",
            "syscall(425, 8, bytes(120))",  # io_uring_setup
        )
        for listener in (tcp, unix):
            listener.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listener.accept()


def test_no_signals_to_others(sandbox):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        blocked(
            sandbox,
            f"os.kill({victim.pid}, 9)",
            "os.kill(os.getppid(), 9)",
            "os.kill(0, 9)",
            "os.kill(-1, 9)",
            f"syscall(200, {victim.pid}, 9)",  # tkill
            f"syscall(234, {victim.pid}, {victim.pid}, 9)",  # tgkill
            f"syscall(129, {victim.pid}, 9, bytes(128))",  # rt_sigqueueinfo
            "os.setsid()",
            # whom the input and output of a file signals: F_SETOWN, F_SETSIG, F_SETOWN_EX,
            # FIOSETOWN, SIOCSPGRP
            f"__import__('fcntl').fcntl(1, 8, {victim.pid})",
            "__import__('fcntl').fcntl(1, 10, 9)",
            f"syscall(72, 1, 15, (ctypes.c_int * 2)(1, {victim.pid}))",
            f"syscall(16, 1, 0x8901, (ctypes.c_int * 1)({victim.pid}))",
            f"syscall(16, 1, 0x8902, (ctypes.c_int * 1)({victim.pid}))",
            "syscall(16, 1, 0x5452, (ctypes.c_int * 1)(1))",  # FIOASYNC
            f"os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19)",
        )
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_the_system_call_filter_alone_lets_no_signal_out_and_a_programs_own_through():
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    layers = [layer for layer in LAYERS if layer != "landlock"]  # which may refuse signals too
    box = Sandbox(Limits(timeout_s=20), layers=layers)
    try:
        blocked(
            box,
            f"os.kill({victim.pid}, 9)",
            f"syscall(200, {victim.pid}, 9)",  # tkill
            f"syscall(234, {victim.pid}, {victim.pid}, 9)",  # tgkill
        )
        assert victim.poll() is None
        for own in ("os.kill(os.getpid(), 0)", "syscall(234, os.getpid(), os.getpid(), 0)"):
            outcome = box.run(f"{ATTEMPTS}\n{own}")
            assert outcome.passed, outcome
    finally:
        box.close()
        victim.kill()
        victim.wait()


def test_the_calls_that_a_program_may_make_are_those_that_the_list_names():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("needs the kernel's header of system calls (linux-libc-dev)")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    named = [call.split("=") for calls in CALLS.values() for call in calls.split()]
    assert [numbers[name] for name, _ in named] == [number for _, number in named]
    assert not {"chmod", "socket", "execve", "ptrace", "kill"} & {name for name, _ in named}


def test_a_program_that_ignores_signals_is_killed(hasty):
    program = (
        "import signal, ctypes\n"
        "for s in set(range(1, 65)) - {9, 19, 32, 33}:\n    signal.signal(s, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"
    )
    assert hasty.run(program).why.startswith("time limit of")


def test_a_gigabyte_of_output_or_files_is_cut_short(sandbox):
    outcome = sandbox.run("for _ in range(1000):\n    print('x' * 10**6)")
    assert outcome.why == "more than 64 KiB of output" and len(outcome.output) <= 2000
    one = sandbox.run("open('big', 'wb').write(bytes(1 << 30))")
    assert not one.passed


# Each fills the disk in a way of its own, and prints how many MiB it has got, or files.
FILLING = {
    "by name": "write('f{}')",
    "in one file": "write('f')",
    "without a name": "write('f{}', unlink=True)",
    "reserved": "write('f{}', unlink=True, reserve=True)",
    "reserved in one file": "write('f', reserve=True)",
    "mapped": "write('f{}', unlink=True, mapped=True)",
    "by threads": "threads(lambda: write(f'{threading.get_ident()}-{{}}', unlink=True))",
}
FILL = """
import mmap, os, threading
kept, got = [], []

def write(name, unlink=False, reserve=False, mapped=False):
    n = 0
    try:
        while True:
            fd = os.open(name.format(n), os.O_RDWR | os.O_CREAT | os.O_APPEND * (not reserve))
            if unlink:
                os.unlink(name.format(n))
            n += 1
            if reserve:
                os.posix_fallocate(fd, n << 20 if "{}" not in name else 0, 1 << 20)
            else:
                assert os.write(fd, bytes(1 << 20)) == 1 << 20
            got.append(1)
            if mapped:
                kept.append(mmap.mmap(fd, 4096))
            if mapped or not unlink:
                os.close(fd)
            if len(got) > 100:
                return
    except (OSError, AssertionError):
        pass

def threads(target):
    every = []
    for _ in range(3):
        thread = threading.Thread(target=target)
        try:
            thread.start()
        except RuntimeError:  # each reserves address space, which three at once may not find
            break
        every.append(thread)
    assert every
    for thread in every:
        thread.join()
"""


@pytest.mark.parametrize("how", FILLING)
def test_no_program_writes_more_than_its_file_system_holds(sandbox, how):
    outcome = sandbox.run(f"{FILL}\n{FILLING[how]}\nprint(len(got))")
    assert outcome.passed and 1 <= int(outcome.output) <= 4, outcome
    # and the next program has all of it again
    assert sandbox.run("open('f', 'wb').write(bytes(3 << 20))").passed


def test_the_number_of_files_is_bounded(sandbox):
    many = (
        "import os\nn = 0\ntry:\n    while n < 5000:\n        {}\n        n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    for make in ("open(str(n), 'w').close()", "os.mkdir(str(n))"):
        outcome = sandbox.run(many.format(make))
        assert outcome.passed and 900 < int(outcome.output) <= 1000, outcome


def test_a_program_cannot_void_its_verdict_by_what_it_leaves(sandbox):
    for left in (
        "os.mkdir('d', 0o300)",
        "os.mkdir('d', 0)",
        "os.mkdir('d'); os.chdir('d'); os.mkdir('e', 0)",
    ):
        outcome = sandbox.run(f"import os\n{left}\nraise SystemExit(1)")
        assert not outcome.passed and outcome.why.startswith("exit code 1")
    assert sandbox.run("import os; assert os.listdir('.') == []").passed


def test_a_lock_on_an_inherited_file_ends_with_its_program(sandbox):
    lock = "import fcntl\nfcntl.flock({}, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    for descriptor in (0, 1, 2):
        for _ in range(2):
            assert sandbox.run(lock.format(descriptor)).passed


def test_a_program_that_waits_is_wrong_and_not_unjudged(hasty):
    for wait in ("time.sleep(1000)", "os.read(3, 1)", "threading.Event().wait()"):
        outcome = hasty.run(f"import os, threading, time\n{wait}")
        assert outcome.why == "time limit of 1 s"


def test_cpu_seconds_of_all_threads_count(hasty):
    spin = (
        "import threading, hashlib\ndef spin():\n    while True: hashlib.sha256(bytes(1 << 20))\n"
    )
    spin += "for _ in range(8): threading.Thread(target=spin, daemon=True).start()\nspin()"
    assert hasty.run(spin).why == "time limit of 1 s"


def test_time_without_a_cpu_is_not_charged(monkeypatch):
    waited = {}
    monkeypatch.setattr("rlcore.graders.sandbox.clock.delay", lambda pid: waited.get(pid, 5.0))
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        waited[sleeper.pid] = 0.0
        clock = Clock(sleeper.pid, judge=1)
        began = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: began + 100.0)
        assert 99.0 < clock.charged() <= clock.wall() < 101.0
        waited |= {sleeper.pid: 60.0, 1: 35.0}
        assert 9.0 < clock.charged() < 11.0
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_program_is_charged_for_its_processes_and_not_for_their_waits(monkeypatch):
    runner, child, judge = 5_000_001, 5_000_002, 5_000_003  # numbers that no process has
    waits = {runner: 1.0, child: 60.0, judge: 5.0}
    monkeypatch.setattr("rlcore.graders.sandbox.clock.delay", waits.__getitem__)
    tally = Tally()
    clock = Clock(runner, judge, tally)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 100.0)
    for running, cpu_s, charged in ((0, 2.0, 89), (child, 2.0, 29), (child, 50.0, 50)):
        tally.write(running, cpu_s, 10.0)
        assert clock.charged() == pytest.approx(charged, abs=0.5)
        assert clock.running() == (running or runner)
    tally.close()


def test_a_program_that_got_no_cpu_has_no_verdict(sandbox, monkeypatch):
    late = {"limit": LATE, "ended": "", "output": ""}
    monkeypatch.setattr(sandbox, "_run", lambda *job: ({"passed": False, "why": ""}, late))
    with pytest.raises(SandboxError, match="too busy to judge a program"):
        sandbox.run("print(1)")


def test_killed_programs_leave_nothing_behind(sandbox, hasty):
    late = hasty.run("open('f', 'w').write('x')\nwhile True: pass")
    deep = sandbox.run("import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')")
    assert late.why.startswith("time limit of")
    assert "No space left on device" in deep.output
    for box in (hasty, sandbox):
        assert box.run("import os; assert os.listdir('.') == []").passed


def test_the_folder_goes_with_the_sandbox(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    box = Sandbox(Limits())
    assert box.run("open('f', 'w').write('x')").passed and os.listdir(tmp_path)
    box.close()
    assert os.listdir(tmp_path) == []


def test_a_dead_server_is_an_error_not_a_verdict_and_takes_its_program_along():
    box = Sandbox(Limits(timeout_s=deadline(30)))
    server = psutil.Process(box.pids[0])
    programs = []

    def kill():
        while not programs:
            programs.extend(server.children())
        server.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    # the kill may come before the program is confined, or while it runs
    ended = "server ended with exit code -9|ended before it was confined"
    with pytest.raises(SandboxError, match=ended):
        box.run("while True: pass")
    killer.join()
    wait_for_end(programs, 10, "the server's program")


def test_a_judge_that_died_between_two_programs_is_replaced(sandbox):
    assert sandbox.run("def f(): return 1", "assert f() == 1", ["f"]).passed
    psutil.Process(sandbox.pids[1]).kill()
    psutil.Process(sandbox.pids[1]).wait(deadline(10))
    assert sandbox.run("def f(): return 1", "assert f() == 1", ["f"]).passed


def test_a_program_that_could_not_be_confined_has_no_verdict():
    box = Sandbox(Limits(timeout_s=deadline(5)))
    folder = box.run("import os\nprint(os.getcwd())").output.strip()
    os.rmdir(folder)
    with pytest.raises(SandboxError, match=r"could not be confined|server ended"):
        box.run("def f(): return 1", "assert f() == 1", ["f"])


def test_fewer_layers_still_run_and_limit_programs():
    box = Sandbox(Limits(timeout_s=deadline(5), memory_mib=256), layers=["limits", "capabilities"])
    try:
        assert box.run("def f(): return 1", "assert f() == 1", ["f"]).passed
        outcome = box.run("hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 20))")
        assert not outcome.passed and "MemoryError" in outcome.output
    finally:
        box.close()


@pytest.mark.parametrize("missing", [["landlock"], ["landlock", "seccomp"]])
def test_a_machine_that_lacks_layers_is_refused_or_says_so(tmp_path, monkeypatch, caplog, missing):
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(MBPP) + "\n")
    layers = tuple(layer for layer in LAYERS if layer not in missing)
    monkeypatch.setattr("rlcore.tasks.code.available", lambda: layers)
    with pytest.raises(UserError, match=r"^task\.args\.confinement=full needs landlock.*reduced"):
        make_task("mbpp", {"train_path": str(path)})
    task = make_task("mbpp", {"train_path": str(path), "confinement": "reduced"})
    assert f"without {', '.join(missing)}" in caplog.text
    try:
        item = task.item("train", 0)
        assert task.grade(item, task.worked_answer(item)).reward == 1.0
        assert task.grade(item, "def area(r): return 0").reward == 0.0
    finally:
        task.close()


@pytest.mark.parametrize(
    "body",
    [
        "return ascii_lowercase[n] + digits[0]",
        "return str(SortedList([n, 2, 1])[0])",
        "return str(int(np.sum(np.array([n, 2]))))",
        "return str(numpy.gcd(n, 9))",
        "return str(date(2024, 1, n + 1).day)",
        "return str(Counter('aab').most_common(1)[0][1] + inf)",
        "return loads('[1]') and match('a', 'a')[0] + str(pow(n, 2, 7)) + str(reduce(add, [n, n]))",
        "return str([bisect_left([1, 2], n), heapify([1]), gcd(n, 6), randint(1, 1)])",
    ],
)
def test_leetcode_programs_find_what_the_site_imports_for_them(tmp_path, body):
    if "Sorted" in body or "np." in body or "numpy" in body:
        pytest.importorskip("sortedcontainers" if "Sorted" in body else "numpy")
    path = tmp_path / "rows.jsonl"
    row = {
        "problem": "p",
        "solutions": f"class Solution:\n    def f(self, n: int) -> str:\n        {body}\n",
        "tests": {
            "functional": "def check(c):\n    assert type(c(n=3)) is str\ncheck(Solution().f)"
        },
    }
    path.write_text(json.dumps(row) + "\n")
    task = make_task("leetcode", {"train_path": str(path)})
    try:
        item = task.item("train", 0)
        assert task.grade(item, task.worked_answer(item)).reward == 1.0
    finally:
        task.close()


LEETCODE = {
    "problem": "Reverse a list.\n```python\nclass Solution:\n"
    "    def reverse(self, head: Optional[ListNode]):\n```",
    "solutions": "class Solution:\n    def reverse(self, head: Optional[ListNode]):\n"
    "        last = None\n        while head:\n"
    "            head.next, last, head = last, head, head.next\n        return last\n",
    "tests": {
        "functional": "def check(candidate):\n"
        "    assert is_same_list(candidate(head = list_node([1,2,3])), list_node([3,2,1]))\n\n\n"
        "check(Solution().reverse)"
    },
}
TREE = {
    "problem": "Mirror a tree.",
    "solutions": "class Solution:\n    def mirror(self, root):\n        if root:\n"
    "            root.left, root.right = self.mirror(root.right), self.mirror(root.left)\n"
    "        return root\n",
    "tests": {
        "functional": "def check(candidate):\n"
        "    mirrored = tree_node([1,3,2,None,None,4])\n"
        "    assert is_same_tree(candidate(tree_node([1,2,3,None,4])), mirrored)\n"
        "    assert candidate(tree_node([])) is None\n\ncheck(Solution().mirror)"
    },
}
MBPP = {
    "text": "Write a function to find the area of a circle.",
    "code": "def area(r):\n    return math.pi * r ** 2",
    "test_list": ["assert round(area(1), 2) == 3.14", "assert area(2) == UNIT * 4"],
    "test_setup_code": "import math\nUNIT = math.pi",
}


def test_code_tasks_judge_by_tests(tmp_path):
    leet, mbpp = tmp_path / "leet.jsonl", tmp_path / "mbpp.jsonl"
    leet.write_text(json.dumps(LEETCODE) + "\n" + json.dumps(TREE) + "\n")
    mbpp.write_text(json.dumps(MBPP) + "\n")
    for name, path, count in (("leetcode", leet, 2), ("mbpp", mbpp, 1)):
        args = {"train_path": str(path), "format_reward": 0.1, "timeout_s": deadline(3)}
        task = make_task(name, args)
        try:
            for index in range(count):
                item = task.item("train", index)
                worked = task.worked_answer(item)
                assert task.grade(item, f"Let me think.\n{worked}\nDone.").reward == 1.0
                bare = worked.removeprefix("```python\n").removesuffix("\n```")
                assert task.grade(item, bare).parts == {"correct": 1.0, "format": 0.0}
                assert task.grade(
                    item, "```python\nimport os; os._exit(0)\n```"
                ).reward == pytest.approx(0.1)
                assert task.grade(item, "I do not know.").reward == 0.0
            assert task.grade(item, "```python\nwhile True: pass\n```").parts == {
                "correct": 0.0,
                "format": 1.0,
            }
        finally:
            task.close()
    assert "area(1), 2) == 3.14" in item.question and "area(2)" not in item.question


def test_rows_whose_tests_test_nothing_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**MBPP, "test_list": ["assert True"]}) + "\n")
    with pytest.raises(UserError, match="row 1: field test_list: they use no name"):
        make_task("mbpp", {"train_path": str(path)})


def test_code_rows_need_tests(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**LEETCODE, "tests": {"functional": ""}}) + "\n")
    with pytest.raises(UserError, match=r"row 1: field tests\.functional is empty"):
        make_task("leetcode", {"train_path": str(path)})
    with pytest.raises(UserError, match=r"task\.args\.timeout_s=0 "):
        make_task("leetcode", {"train_path": str(path), "timeout_s": 0})
