"""The cores that a process may use: those it is bound to, within its quota."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
US = 1_000_000


@dataclass(frozen=True, slots=True)
class Quota:
    """The processor time that a control group of this process may use.

    Example: Quota(2.0, ...) (of a container that was started with two CPUs)
    """

    cores: float
    used_s: Callable[[], float]  # processor seconds of all processes of the group so far


def quota(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> Quota | None:
    """The smallest quota of this process's control groups, of version 2 or 1; None: there is
    none."""
    found = []
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots, read = (groups, groups / "unified"), _version_2
        elif "cpu" in controllers.split(","):
            roots, read = (groups / controllers, groups / "cpu"), _version_1
        else:
            continue
        # a container sees its own group as the root, or not at all
        inside = [*Path(path.lstrip("/")).parents, Path(path.lstrip("/"))]
        found += [read(root / name) for root in roots for name in inside]
    return min(filter(None, found), key=lambda q: q.cores, default=None)


def _version_2(folder: Path) -> Quota | None:
    if not (limit := folder / "cpu.max").is_file():
        return None
    allowed, period = limit.read_text().split()
    if allowed == "max":
        return None

    def used_s() -> float:
        words = (line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        return next(int(n) for name, n in words if name == "usage_usec") / US

    return Quota(int(allowed) / int(period), used_s)


def _version_1(folder: Path) -> Quota | None:
    if not (limit := folder / "cpu.cfs_quota_us").is_file():
        return None
    if (allowed := int(limit.read_text())) < 0:
        return None
    period = int((folder / "cpu.cfs_period_us").read_text())
    usage = Path(str(folder).replace("/cpu/", "/cpuacct/", 1)) / "cpuacct.usage"
    if not usage.is_file():
        usage = folder / "cpuacct.usage"  # the two controllers are mounted together
    return Quota(allowed / period, lambda: int(usage.read_text()) / 1e9)


def cores() -> int:
    """The cores that this process may use: those it is bound to, and no more than its quota."""
    limit = quota()
    bound = len(os.sched_getaffinity(0))
    return bound if limit is None else max(1, min(bound, int(limit.cores)))


def asked_cores() -> int:
    """`cores`, and no more than OMP_NUM_THREADS asks for: of a list, one number a level of nested
    loops, the first. Any other text asks for nothing."""
    asked = re.match(r"\s*([1-9][0-9]*)\s*(?:,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    return min(cores(), int(asked[1])) if asked else cores()
