"""The process that runs untrusted programs: `python -I -S sandbox_server.py <socket fd>`, started by `sandbox.py`.

Standard library only, by path and in isolated mode: it holds no secrets, no environment and no third-party package, and
every program is a fork of it. A program is confined by four layers, all of them required:

* rlimits: address space, CPU seconds, file size, open files;
* no capabilities and no_new_privs;
* Landlock: the standard library and shared libraries can be read, its own temporary folder written, nothing else;
* seccomp: an allowlist of system calls, of fcntl and ioctl also of their commands; no sockets, no new processes
  (threads only), no exec, no signals to others.

The server watches the clock, the output, the threads and the temporary folder, and kills a program that exceeds them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

# Imported before the fork so that programs find them loaded.
for _names in (
    ("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    ("math", "operator", "queue", "random", "re", "statistics", "string", "threading", "typing"),
):
    for _name in _names:
        importlib.import_module(_name)

VERDICT_FD = 3
POLL_S = 0.05
MAX_FILES = 1000
MAX_THREADS = 64
REMOVE_S = 60.0
LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446
READ_FS = 1 << 0 | 1 << 2 | 1 << 3  # execute (shared libraries are mapped executable), read files, read folders
CAPSET, CAPABILITY_V3 = 126, 0x20080522
AUDIT_ARCH_X86_64 = 0xC000003E
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQ, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
CLONE, CLONE3, CLONE_THREAD = 56, 435, 0x00010000
# Commands of calls that also do more than a program needs: owners of a file's signals could be anyone's processes.
COMMANDS = {
    72: [0, 1, 2, 3, 4, 5, 6, 7, 1030],  # fcntl: duplicates, flags, locks
    16: [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A],  # ioctl: is it a terminal, its size, flags
}
SELF_ONLY = {62: "kill", 234: "tgkill", 302: "prlimit64"}  # allowed on the program itself

# x86_64. Whatever is not here fails with EPERM: sockets, fork, exec, ptrace, mounts, namespaces, keys, io_uring, shared
# memory, and what Landlock does not govern (chmod, chown, utimes, extended attributes).
ALLOWED = {
    "reading and writing": [0, 1, 2, 3, 8, 17, 18, 19, 20, 32, 33, 40, 74, 75, 77, 285, 292, 295, 296, 326],
    "files": [4, 5, 6, 21, 73, 78, 79, 80, 82, 83, 84, 87, 89, 95, 137, 138, 217, 257, 258, 262, 263, 264, 267, 269],
    "files, newer": [316, 332, 439],
    "memory": [9, 10, 11, 12, 25, 26, 28, 149, 150, 324],
    "signals": [13, 14, 15, 35, 36, 37, 38, 131, 219, 230],
    "waiting": [7, 22, 23, 61, 232, 233, 270, 271, 281, 290, 291, 293],
    "time": [96, 201, 228, 229],
    "identity": [39, 63, 97, 98, 99, 100, 102, 104, 107, 108, 110, 111, 115, 121, 124, 186],
    "threads": [24, 60, 158, 202, 204, 218, 231, 273, 274, 318, 334, 145, 140],
}


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def limit_resources(memory_mib: int, cpu_s: int, file_mib: int) -> None:
    """Set hard limits; none can be raised again once the capabilities are gone."""
    for what, value in (
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_mib << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def drop_privileges() -> None:
    """No capabilities now, none by any later exec."""
    _check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(LIBC.syscall(CAPSET, struct.pack("II", CAPABILITY_V3, 0), bytes(24)), "capset")


def restrict_files(folder: str) -> None:
    """Landlock: read the interpreter's libraries, read and write `folder` and /dev/null."""
    abi = _check(LIBC.syscall(LANDLOCK_CREATE, None, 0, 1), "Landlock")
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    # Files; from version 4 TCP bind and connect; from 6 abstract sockets and signals.
    fields = [everything, *([3] if abi >= 4 else []), *([3] if abi >= 6 else [])]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = _check(LIBC.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0), "Landlock ruleset")
    library = os.path.dirname(os.__file__)
    readable = [library, os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib", "/usr/share/zoneinfo"]
    for path, access in [
        *[(path, READ_FS) for path in readable],
        (folder, everything),
        ("/dev/null", 1 << 1 | 1 << 2),
        ("/dev/urandom", 1 << 2),
    ]:
        if os.path.exists(path):
            at = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", access, at)
            _check(LIBC.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule for {path}")
            os.close(at)
    _check(LIBC.syscall(LANDLOCK_RESTRICT, ruleset, 0), "Landlock restriction")
    os.close(ruleset)


def restrict_system_calls() -> None:
    """seccomp: the allowlist above; the last thing to be set up, since it forbids setting up."""
    refuse = (RETURN, 0, 0, FAIL | errno.EPERM)
    program = [(LOAD, 0, 0, 4), (JUMP_EQ, 1, 0, AUDIT_ARCH_X86_64), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for number in (n for group in ALLOWED.values() for n in group):
        program += [(JUMP_EQ, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    # clone3 hides its flags from the filter: as if the kernel had none, the C library then uses clone.
    program += [(JUMP_EQ, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    program += [(JUMP_EQ, 0, 4, CLONE), (LOAD, 0, 0, 16), (JUMP_SET, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW), refuse]
    for number, commands in COMMANDS.items():
        program += [(JUMP_EQ, 0, 2 * len(commands) + 2, number), (LOAD, 0, 0, 24)]
        for command in commands:
            program += [(JUMP_EQ, 0, 1, command), (RETURN, 0, 0, ALLOW)]
        program += [refuse]
    for number in SELF_ONLY:
        allow_zero = (JUMP_EQ, 1, 0, 0) if number == 302 else (JUMP_EQ, 1, 0, os.getpid())
        program += [(JUMP_EQ, 0, 5, number), (LOAD, 0, 0, 16), allow_zero, (JUMP_EQ, 0, 1, os.getpid())]
        program += [(RETURN, 0, 0, ALLOW), refuse]
    code = b"".join(struct.pack("HBBI", *line) for line in [*program, refuse])
    buffer = ctypes.create_string_buffer(code)
    filters = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    _check(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(filters), 0, 0), "seccomp")


def _become(request: dict[str, Any], folder: str, nonce: bytes, output: int, verdict: int, server: int) -> None:
    """In the fork: confine this process, run the program's parts in one namespace, write the nonce, end."""
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died before the signal was asked for
            os._exit(1)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(verdict, VERDICT_FD)
        os.closerange(VERDICT_FD + 1, 256)
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = folder
        limit_resources(request["memory_mib"], int(request["timeout_s"]) + 2, request["file_mib"])
        drop_privileges()
        restrict_files(folder)
        restrict_system_calls()
        names: dict[str, Any] = {"__name__": "solution"}
        for number, part in enumerate(request["parts"]):
            exec(compile(part, f"<part {number}>", "exec", dont_inherit=True), names)
        os.write(VERDICT_FD, nonce)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):  # the program may have closed it
            sys.stdout.flush()
        os._exit(1)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run one program: {"passed", "why", "output", "seconds"}."""
    nonce = os.urandom(16)
    folder = tempfile.mkdtemp(prefix="sandbox-")
    output, output_end = os.pipe()
    verdict, verdict_end = os.pipe()
    start, server = time.monotonic(), os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _become(request, folder, nonce, output_end, verdict_end, server)
        os.close(output_end)
        os.close(verdict_end)
        why, text = _watch(pid, output, folder, start + request["timeout_s"], request)
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        passed = not why and os.read(verdict, len(nonce)) == nonce
        if not passed and not why:
            why = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status} before the end"
        shown = text.decode(errors="replace")[-2000:]
        return {"passed": passed, "why": why, "output": shown, "seconds": time.monotonic() - start}
    finally:
        os.close(output)
        os.close(verdict)
        _remove(folder)


def _watch(pid: int, output: int, folder: str, deadline: float, request: dict[str, Any]) -> tuple[str, bytes]:
    """Follow the program until its output ends: (limit that it exceeded or "", output so far)."""
    text = b""
    looked = time.monotonic()
    while (now := time.monotonic()) < deadline:
        if now - looked >= POLL_S:
            looked = now
            if _oversized(folder, request["file_mib"] << 20):
                return f"more than {request['file_mib']} MiB or {MAX_FILES} of files", text
            if _threads(pid) > MAX_THREADS:
                return f"more than {MAX_THREADS} threads", text
        if select.select([output], [], [], min(POLL_S, deadline - now))[0]:
            data = os.read(output, 1 << 16)
            if not data:
                return "", text
            text += data
            if len(text) > request["output_kib"] << 10:
                return f"more than {request['output_kib']} KiB of output", text
    return f"time limit of {request['timeout_s']:g} s", text


def _threads(pid: int) -> int:
    """Of a child that has not been waited for, which may have ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _oversized(folder: str, limit: int) -> bool:
    """More than `limit` bytes on disk or MAX_FILES entries; looks no further than it must."""
    total = entries = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    entries += 1
                    status = entry.stat(follow_symlinks=False)
                    total += status.st_blocks * 512
                    if total > limit or entries > MAX_FILES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:  # the program removed it meanwhile
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
            raise
    return False


def _remove(folder: str) -> None:
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):  # nested deeper than Python's own removal goes
        subprocess.run(["/bin/rm", "-rf", "--", folder], check=True, timeout=REMOVE_S)


def main(fd: int) -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if platform.machine() != "x86_64":
        raise SystemExit("the sandbox knows the system calls of x86_64 only")
    link = socket.socket(fileno=fd)
    for line in link.makefile("rb"):
        try:
            answer = run(json.loads(line))
        except OSError as error:
            answer = {"fault": str(error)}
        link.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
