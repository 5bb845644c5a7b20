"""Confinement of the sandbox's processes. Linux only, standard library only.

Layers, all of them required unless `task.args.confinement=reduced`:

* limits: address space, CPU seconds, file size, open files;
* capabilities: none, and no_new_privs;
* landlock: libraries can be read, the program's own folder written, nothing else;
* tmpfs: the program's folder is a separate file system, in memory, of a fixed size: whatever is
  in it counts, under a name or not. Its root is another one, which has the libraries and no other
  path of the machine. Without this layer a program writes no files, and learns which paths exist;
* seccomp: an allowlist of system calls, of fcntl and ioctl also of their commands. No sockets but a
  process's own pair; no new processes (threads only), no exec, no signals to others. Known for
  x86_64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

LAYERS = ("limits", "capabilities", "landlock", "tmpfs", "seccomp")
LIBC = ctypes.CDLL(None, use_errno=True)
# looked up here, or every fork does it
PRCTL, CAPSET, SYSCALL = LIBC.prctl, LIBC.capset, LIBC.syscall

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
MS_BIND = 1 << 12
MNT_DETACH = 2
# Paths of a process's streams, and where in its folder they are: its root has no /proc.
STREAMS = {
    ".stdin": ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"),
    ".stdout": ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"),
}
SEMAPHORES = "/dev/shm"  # files of named ones, which pools of threads have
ROOT_MIB, ROOT_FILES = 1, 1000  # folders that lead to what is bound
PROBE_S = 20.0
NO_CAPABILITIES = struct.pack("II", 0x20080522, 0), bytes(24)  # of version 3
# the same numbers on every architecture
LANDLOCK_CREATE = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT = 446
# execute (shared libraries are mapped executable), read files, read folders
READ_FS = 1 << 0 | 1 << 2 | 1 << 3
READ_FILE = 1 << 2
WRITE_FILE = 1 << 1
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # Landlock version -> kinds of access; 16 from 5 on
AUDIT_ARCH_X86_64 = 0xC000003E
ALLOW = 0x7FFF0000
KILL = 0x80000000
FAIL = 0x00050000
LOAD, JUMP, JUMP_EQ, JUMP_FROM, JUMP_SET, RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
CLONE, CLONE3, CLONE_THREAD = 56, 435, 0x00010000
# Commands of calls that also do more than a program needs: owners of a file's signals could be
# anyone's processes.
COMMANDS = {
    72: [0, 1, 2, 3, 4, 5, 6, 7, 1030],  # fcntl: duplicates, flags, locks
    # ioctl: is it a terminal, its size, flags
    16: [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A],
}
SENDTO, SOCKETPAIR, AF_UNIX = 44, 53, 1
KILL_CALL, TGKILL, PRLIMIT = 62, 234, 302  # allowed on the process itself
OWN_PID = 0xFFFFFFFF  # stands for it in the filter until the process has one

# System calls of x86_64 by name and number. Whatever is not here fails with EPERM: sockets, fork,
# exec, ptrace, mounts, namespaces, keys, io_uring, shared memory, and what Landlock does not govern
# (chmod, chown, utimes, extended attributes).
CALLS = {
    "reading and writing": (
        "read=0 write=1 open=2 close=3 lseek=8 pread64=17 pwrite64=18 readv=19 writev=20 dup=32 "
        "dup2=33 sendfile=40 fsync=74 fdatasync=75 ftruncate=77 fallocate=285 dup3=292 "
        "preadv=295 pwritev=296 copy_file_range=326"
    ),
    "files": (
        "stat=4 fstat=5 lstat=6 access=21 flock=73 getdents=78 getcwd=79 chdir=80 rename=82 "
        "mkdir=83 rmdir=84 link=86 unlink=87 readlink=89 umask=95 statfs=137 fstatfs=138 "
        "getdents64=217 openat=257 mkdirat=258 newfstatat=262 unlinkat=263 renameat=264 "
        "readlinkat=267 faccessat=269"
    ),
    "files, newer": "renameat2=316 statx=332 faccessat2=439",
    "memory": (
        "mmap=9 mprotect=10 munmap=11 brk=12 mremap=25 msync=26 madvise=28 mlock=149 "
        "munlock=150 membarrier=324"
    ),
    "signals": (
        "rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 nanosleep=35 getitimer=36 alarm=37 "
        "setitimer=38 sigaltstack=131 restart_syscall=219 clock_nanosleep=230"
    ),
    "waiting": (
        "poll=7 pipe=22 select=23 wait4=61 epoll_wait=232 epoll_ctl=233 pselect6=270 ppoll=271 "
        "epoll_pwait=281 eventfd2=290 epoll_create1=291 pipe2=293"
    ),
    "time": "gettimeofday=96 time=201 clock_gettime=228 clock_getres=229",
    "identity": (
        "getpid=39 uname=63 getrlimit=97 getrusage=98 sysinfo=99 times=100 getuid=102 "
        "getgid=104 geteuid=107 getegid=108 getppid=110 getpgrp=111 getgroups=115 getpgid=121 "
        "getsid=124 gettid=186"
    ),
    "an event loop's own pair of sockets": "recvfrom=45",
    "threads": (
        "sched_yield=24 exit=60 getpriority=140 sched_getscheduler=145 arch_prctl=158 futex=202 "
        "sched_getaffinity=204 set_tid_address=218 exit_group=231 set_robust_list=273 "
        "get_robust_list=274 getrandom=318 rseq=334"
    ),
}
ALLOWED = {
    group: [int(call.partition("=")[2]) for call in calls.split()] for group, calls in CALLS.items()
}


def available() -> tuple[str, ...]:
    """The layers that this machine has."""
    layers = ["limits", "capabilities"]
    if LIBC.syscall(LANDLOCK_CREATE, None, 0, 1) > 0:
        layers.append("landlock")
    if _has_own_mounts():
        layers.append("tmpfs")
    if platform.machine() == "x86_64":
        layers.append("seccomp")
    return tuple(layers)


@cache
def _has_own_mounts() -> bool:
    """True if a process may mount a tmpfs that it alone sees, tried in its own process."""
    import subprocess  # not in the server: what it imports costs every fork of it

    probe = [sys.executable, "-I", "-S", __file__]
    ended = subprocess.run(probe, stderr=subprocess.DEVNULL, timeout=PROBE_S, check=False)
    return ended.returncode == 0


def own_mounts() -> None:
    """Give this process, which has one thread, mounts that nobody else sees. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    if LIBC.unshare(CLONE_NEWNS) < 0:  # not as root: within a user namespace
        _check(LIBC.unshare(CLONE_NEWNS | CLONE_NEWUSER), "namespaces of mounts and users")
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _check(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "its own mounts")


def mount_tmpfs(folder: str, mib: int, files: int) -> None:
    """Mount an empty file system of at most so many MiB and files. Raises OSError."""
    options = f"size={mib}m,nr_inodes={files},mode=700".encode()
    flags = MS_NOSUID | MS_NODEV
    _check(LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options), f"tmpfs at {folder}")


def make_root(folder: str, packages: Iterable[str]) -> str:
    """Mount a root at `folder` that has the paths a program may read and an empty `folder`, and
    nothing else of the machine. Returns where that folder is for now. Raises OSError."""
    mount_tmpfs(folder, ROOT_MIB, ROOT_FILES)
    bound: list[str] = []
    for path in sorted((*_libraries(packages), *DEVICES)):
        if not os.path.exists(path) or any(path.startswith(f"{b}/") for b in bound):
            continue
        inside = folder + path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.isdir(path):
            os.mkdir(inside)
        else:
            os.close(os.open(inside, os.O_CREAT))
        bind = LIBC.mount(path.encode(), inside.encode(), None, MS_BIND | MS_REC, None)
        _check(bind, f"binding {path}")
        bound.append(path)
    os.makedirs(folder + folder)
    os.symlink(folder, folder + SEMAPHORES)
    for stream, paths in STREAMS.items():
        for path in paths:
            os.makedirs(os.path.dirname(folder + path), exist_ok=True)
            os.symlink(os.path.join(folder, stream), folder + path)
    return folder + folder


def unmount(folder: str) -> None:
    """Unmount it, with all of its content. Raises OSError."""
    _check(LIBC.umount2(folder.encode(), MNT_DETACH), f"unmounting {folder}")


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


class Confinement:
    """Prepared once, in the server, so that little is left to do in every fork.

    `limits` by name of `resource.RLIMIT_*`. `folder`: may be read and written, None: no folder may.
    `packages`: may be read, in addition to the standard library. `calls`: further system calls to
    allow. Raises OSError if a layer cannot be set up.
    """

    def __init__(
        self,
        layers: Sequence[str],
        limits: Mapping[str, int],
        *,
        folder: str | None,
        packages: Mapping[str, str],
        calls: Sequence[int] = (),
    ) -> None:
        self._layers = layers
        self._limits = [_within(getattr(resource, name), value) for name, value in limits.items()]
        self._folder, self._packages = folder, packages.values()
        self._filter = Filter(_system_call_filter(calls)) if "seccomp" in layers else None

    @property
    def has_rules(self) -> bool:
        return "landlock" in self._layers

    def rules(self) -> int | None:
        """A descriptor of the file rules, about the folder as it is mounted now; None without that
        layer. Raises OSError."""
        return _ruleset(self._packages, self._folder) if self.has_rules else None

    def apply(self, rules: int | None) -> None:
        """Confine this process for good, by file rules at descriptor `rules`. Raises OSError."""
        # With capabilities gone, hard limits cannot be raised again.
        if "limits" in self._layers:
            for what, both in self._limits:
                resource.setrlimit(what, both)
        if "capabilities" in self._layers:
            _check(PRCTL(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
            _check(CAPSET(*NO_CAPABILITIES), "capset")
        if rules is not None:
            _check(SYSCALL(LANDLOCK_RESTRICT, rules, 0), "Landlock")
            os.close(rules)
        if self._filter is not None:  # last, since it forbids setting anything up
            self._filter.install()


def _within(what: int, value: int) -> tuple[int, tuple[int, int]]:
    """A limit's number, and both of its values, which are not above what is allowed now."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    return what, (value, value)


DEVICES = {"/dev/null": READ_FILE | WRITE_FILE, "/dev/urandom": READ_FILE}


def _libraries(packages: Iterable[str]) -> list[str]:
    """Paths that a program may read."""
    library = os.path.dirname(os.__file__)
    shared = os.path.join(sys.base_prefix, "lib")
    # beside a package lie the shared libraries of its wheel
    packaged = [path for package in packages for path in (package, f"{package}.libs")]
    return [library, shared, "/lib", "/lib64", "/usr/lib", "/usr/share/zoneinfo", *packaged]


def _ruleset(packages: Iterable[str], folder: str | None) -> int:
    """A Landlock ruleset: read the interpreter's libraries, read and write `folder`."""
    abi = _check(LIBC.syscall(LANDLOCK_CREATE, None, 0, 1), "Landlock")
    everything = (1 << FILE_RIGHTS.get(abi, 16)) - 1
    # Files; from version 4 TCP bind and connect; from 6 abstract sockets and signals.
    fields = [everything, *([3] if abi >= 4 else []), *([3] if abi >= 6 else [])]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    size = len(attributes)
    ruleset = _check(LIBC.syscall(LANDLOCK_CREATE, attributes, size, 0), "Landlock ruleset")
    rules = [(path, READ_FS) for path in _libraries(packages)] + [*DEVICES.items()]
    rules += [(folder, everything)] if folder else []
    for path, access in rules:
        if os.path.exists(path):
            at = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", access, at)
            _check(LIBC.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), f"Landlock, {path}")
            os.close(at)
    return ruleset


def _system_call_filter(calls: Sequence[int]) -> bytes:
    """The allowlist above as a BPF program, OWN_PID in the place of the process's own number."""
    refuse = (RETURN, 0, 0, FAIL | errno.EPERM)
    allow = (RETURN, 0, 0, ALLOW)
    program = [
        (LOAD, 0, 0, 4),
        (JUMP_EQ, 1, 0, AUDIT_ARCH_X86_64),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
        *_allowlist({*calls, *(n for group in ALLOWED.values() for n in group)}),
    ]
    # clone3 hides its flags from the filter: as if the kernel had none, the C library then uses
    # clone.
    program += [(JUMP_EQ, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    program += [(JUMP_EQ, 0, 4, CLONE), (LOAD, 0, 0, 16), (JUMP_SET, 0, 1, CLONE_THREAD), allow]
    program += [refuse]
    for number, commands in COMMANDS.items():
        program += [(JUMP_EQ, 0, 2 * len(commands) + 2, number), (LOAD, 0, 0, 24)]
        for command in commands:
            program += [(JUMP_EQ, 0, 1, command), allow]
        program += [refuse]
    # only a pair, whose ends have no address, and only to the other end
    program += [(JUMP_EQ, 0, 4, SOCKETPAIR), (LOAD, 0, 0, 16), (JUMP_EQ, 0, 1, AF_UNIX), allow]
    program += [refuse, (JUMP_EQ, 0, 6, SENDTO), (LOAD, 0, 0, 48), (JUMP_EQ, 0, 3, 0)]
    program += [(LOAD, 0, 0, 52), (JUMP_EQ, 0, 1, 0), allow, refuse]
    for number in (KILL_CALL, TGKILL, PRLIMIT):
        # 0 names the calling process to prlimit, and its whole group to kill
        first = (JUMP_EQ, 1, 0, 0 if number == PRLIMIT else OWN_PID)
        program += [(JUMP_EQ, 0, 5, number), (LOAD, 0, 0, 16), first, (JUMP_EQ, 0, 1, OWN_PID)]
        program += [allow, refuse]
    return b"".join(struct.pack("HBBI", *line) for line in [*program, refuse])


def _allowlist(numbers: Collection[int]) -> list[tuple[int, int, int, int]]:
    """Instructions that allow these calls and pass others on to what follows. It is a search by
    ranges, since the kernel translates a filter as it is installed, and tries it at each call."""
    edges = [n for n in range(max(numbers) + 2) if (n in numbers) != (n - 1 in numbers)]

    def search(low: int, high: int) -> list[tuple[int, int, int, int]]:
        if low == high:  # a call that is not below so many edges
            return [(RETURN, 0, 0, ALLOW) if low % 2 else (JUMP, 0, 0, 0)]
        middle = (low + high) // 2
        below, others = search(low, middle), search(middle + 1, high)
        return [(JUMP_FROM, len(below), 0, edges[middle]), *below, *others]

    found = search(0, len(edges))
    past = len(found) - 1
    return [(JUMP, 0, 0, past - i) if line[0] == JUMP else line for i, line in enumerate(found)]


class Filter:
    """A BPF program at a new place, which a fork has to give its number alone."""

    def __init__(self, code: bytes) -> None:
        self._code = ctypes.create_string_buffer(code, len(code))
        fields = struct.pack("HP", len(code) // 8, ctypes.addressof(self._code))
        self._program = ctypes.create_string_buffer(fields)
        own = struct.pack("I", OWN_PID)
        self._numbers = [i + 4 for i in range(0, len(code), 8) if code[i + 4 : i + 8] == own]

    def install(self) -> None:
        """Filter this process's system calls for good. Raises OSError."""
        for place in self._numbers:
            struct.pack_into("I", self._code, place, os.getpid())
        _check(PRCTL(PR_SET_SECCOMP, 2, self._program, 0, 0), "seccomp")


if __name__ == "__main__":  # the probe
    own_mounts()
    make_root("/tmp", [])
    os.chroot("/tmp")
