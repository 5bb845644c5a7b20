"""One owner a run folder: the command that writes to it, named in `owner.json` while it lasts.

The file holds host, boot, process id and start time; its modification time is when the owner last
renewed it. It is made with O_EXCL and renewed by touching it, which needs no locks of the file
system and no free space. Ages are differences of two times of the folder's own file system, since
the clocks of two hosts may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlcore.errors import OwnershipLost, UserError

LOCK = "owner.json"
TAKING = ".owner.taking"  # held while the lock of a dead owner is replaced
RENEW_S = 10.0
SILENT_S = 60.0  # an owner on another host that has not renewed for longer may be dead


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that a lock file names. Example: Holder("a1", "rlcore train", "node-3", "5f..",
    "pid:[4026531836]", 4242, 183422)"""

    id: str  # of this ownership
    command: str
    host: str
    boot: str  # of the host's kernel
    pids: str  # its namespace of process ids
    pid: int
    started: int  # clock ticks after the boot

    @classmethod
    def here(cls, command: str) -> Holder:
        """This process as an owner."""
        pid = os.getpid()
        return cls(secrets.token_hex(8), command, *_place(), pid, _started(pid) or 0)

    @property
    def is_here(self) -> bool:
        """True if the holder's process would be visible from this machine."""
        return (self.boot, self.pids) == _place()[1:]

    def dead(self, age_s: float) -> bool:
        """Return whether the process has certainly ended, `age_s` after its last renewal."""
        if self.is_here:
            return _started(self.pid) != self.started
        host, boot, _ = _place()
        return self.host == host and self.boot != boot and age_s > SILENT_S  # has been rebooted

    def __str__(self) -> str:
        where = "this host" if self.is_here else f"host {self.host}"
        return f"{self.command} (process {self.pid} on {where})"


def _place() -> tuple[str, str, str]:
    """(host name, boot, namespace of process ids) of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot, os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks after the boot, which no clock's jump changes; None if
    it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *others = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(others[18])


class Owner:
    """The ownership of a run folder by this process, renewed by a thread until `release`."""

    def __init__(self, folder: Path, holder: Holder, news: str = "") -> None:
        """`news`: a sentence on the owner that was replaced, for the run's log."""
        self.folder = folder
        self.news = news
        self._holder = holder
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="owner", daemon=True)
        self._renewing.start()

    def require(self) -> None:
        """Raise OwnershipLost once the folder is another command's. A disk that does not answer
        takes nothing away."""
        path = self.folder / LOCK
        try:
            found = _read(path)
            if found is None and not self._ended.is_set() and not _create(path, self._holder):
                found = _read(path)
        except OSError:
            return
        if found is not None and found.id != self._holder.id:
            raise OwnershipLost(
                f"run_dir={self.folder} was taken over by {found}: this command ends and writes "
                "nothing more to it"
            )

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            with contextlib.suppress(OSError):
                try:
                    self.require()
                except OwnershipLost:
                    return
                os.utime(self.folder / LOCK)

    def release(self) -> None:
        """Give the folder back; may be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._renewing.join(RENEW_S)  # longer only where the disk hangs
        with contextlib.suppress(OSError, OwnershipLost):
            self.require()
            (self.folder / LOCK).unlink(missing_ok=True)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def own(
    folder: Path,
    command: str,
    *,
    takeover_after_s: float | None = None,
    instead: str = "choose another run_dir",
    watch_s: float = 2 * RENEW_S,
) -> Owner:
    """Become the owner of a folder, which is created if there is none.

    A dead owner of this host is replaced at once. One of another host is replaced once it has been
    silent for `takeover_after_s`, and stays so for `watch_s`; None: never. Raises UserError, and
    leaves no trace, if the folder has another owner or cannot be written. `instead`: what that
    sentence advises.
    """
    path, holder = folder / LOCK, Holder.here(command)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _create(path, holder):
            found = _read(path)
            if found is None:
                continue  # released in between
            age_s = _age_s(path)
            dead = found.dead(age_s)
            if not dead:
                _require_silent(folder, found, age_s, takeover_after_s, instead)
                _require_unchanged(folder, found, watch_s, instead)
            if _replace(path, found, holder):
                news = f"the owner of the run folder before, {found}, is dead"
                if not dead:
                    news = f"the run folder is taken over from {found}, silent for {age_s:.0f} s"
                return Owner(folder, holder, news)
        return Owner(folder, holder)
    except OSError as e:
        raise UserError(f"run_dir={folder} cannot be written: {e.strerror}.") from e


def living_owner(folder: Path) -> Holder | None:
    """The owner of a folder, unless it is dead or, on another host, silent for a minute."""
    found = _read(folder / LOCK)
    if found is None:
        return None
    age_s = _age_s(folder / LOCK)
    return None if found.dead(age_s) or (not found.is_here and age_s > SILENT_S) else found


def _require_silent(
    folder: Path, found: Holder, age_s: float, after_s: float | None, instead: str
) -> None:
    if found.is_here or age_s <= SILENT_S:
        raise UserError(
            f"run_dir={folder} is in use by {found}: wait until it has ended, stop it, or "
            f"{instead}."
        )
    if after_s is None or age_s <= after_s:
        raise UserError(
            f"run_dir={folder} is owned by {found}, which has not renewed {LOCK} for "
            f"{age_s:.0f} s: if it is dead, set takeover_after_s={SILENT_S:.0f} to take its place, "
            f"or {instead}."
        )


def _require_unchanged(folder: Path, found: Holder, watch_s: float, instead: str) -> None:
    """Raise UserError if a lock was renewed within `watch_s`. Its age is by a file system's clock,
    so it is watched by this process's clock as well."""
    path = folder / LOCK
    before, deadline = path.stat().st_mtime_ns, time.monotonic() + watch_s
    while time.monotonic() < deadline:
        time.sleep(min(1.0, watch_s))
        if _read(path) != found or path.stat().st_mtime_ns != before:
            raise UserError(
                f"run_dir={folder} is in use by {found}: wait until it has ended, stop it, or "
                f"{instead}."
            )


def _create(path: Path, holder: Holder) -> bool:
    """Write a lock where there is none; returns whether there was none."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(handle, json.dumps(asdict(holder)).encode())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    return True


def _replace(path: Path, found: Holder, holder: Holder) -> bool:
    """Replace a dead owner's lock; returns whether it was still there. If several commands find it,
    one succeeds."""
    with _taking(path.with_name(TAKING)) as free:
        if not free or _read(path) != found:
            return False
        beside = path.with_name(f".{LOCK}.{holder.id}")
        beside.write_text(json.dumps(asdict(holder)))
        beside.replace(path)
        return True


@contextmanager
def _taking(path: Path) -> Iterator[bool]:
    """Yield whether this command alone may replace the lock now. A command that was killed in the
    middle keeps others from the lock for at most a minute."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):
            if _age_s(path) > SILENT_S:
                path.unlink()
        time.sleep(0.1)
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path) -> Holder | None:
    """The owner that a lock names, an unknown one if it cannot be read; None without a lock."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    with contextlib.suppress(ValueError, TypeError):
        found = Holder(**json.loads(text))
        if isinstance(found.pid, int) and isinstance(found.started, int):
            return found
    # also a lock that is being written at this moment
    return Holder("", "an unknown command", "unknown", "", "", 0, 0)


def _age_s(path: Path) -> float:
    """Seconds since a lock was renewed, by the clock of its file system; 0 without one."""
    probe = path.with_name(f".{LOCK}.{secrets.token_hex(4)}.now")
    try:
        probe.touch()
        return max(0.0, probe.stat().st_mtime - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)
