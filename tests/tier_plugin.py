"""What the tiers need of pytest: timeouts by kind of test, order, shares, budgets.

Timeouts and order hold for every run of pytest; the rest is asked for by `tests/tiers.py`.
"""

from __future__ import annotations

import random
import re
import resource
import time
from pathlib import Path

import pytest
import tiers
from timing import charged, deadline, slowness

CPU_S = "cpu_s"  # name of the property of a test's last report
NOT_STARTED = "not started: the time of this run is spent"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--budget", choices=tiers.PARTS, help="fail above the processor time of this part"
    )
    group.addoption("--shuffle", type=int, metavar="SEED", help="random order of files and tests")
    group.addoption("--until", type=float, metavar="TIME", help="start no test after this time")
    group.addoption("--changed", metavar="FILES", help="run these files (a,b,c), and first")
    group.addoption("--shard", metavar="K/N", help="run one of N shares of all files")
    group.addoption("--turn", type=int, metavar="N", help="run turn N of what rotates")


def pytest_configure(config: pytest.Config) -> None:
    slowness()  # before workers start, which inherit it
    config.pluginmanager.register(_Account(config), "cpu account")
    if config.getoption("--budget") in ("slow", "nightly"):
        config.pluginmanager.register(_Status(), "status")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without a test of the part that runs is not imported: all imports together take a
    tenth of the time of `make test`, in every process that runs tests."""
    if collection_path.suffix != ".py":
        return None
    parts = (name for name, part in tiers.PARTS.items() if part.marks == config.option.markexpr)
    part = next(parts, None)
    if part is None or _may_have(part, collection_path.read_text()):
        return None
    return True


def _may_have(part: str, text: str) -> bool:
    """Whether a test file's text may have tests of a part. Marks are written out where they are
    used."""
    kinds = {"fast": (), "started": ("engine", "ranks", "cluster")}.get(part, (part,))
    if kinds:
        return any(f"mark.{kind}" in text for kind in kinds)
    every = "|".join(("nightly", *tiers.TIMEOUTS_S))
    return re.search(rf"^pytestmark = .*mark\.({every})\b", text, re.MULTILINE) is None


@pytest.hookimpl(trylast=True)  # after the selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select(config, items)
    seed = config.getoption("--shuffle")
    if seed is not None:
        _shuffle(items, seed)
    # Cheap tests first: most mistakes show in seconds. Changed files before all others.
    changed = _changed(config)
    items.sort(key=lambda item: (_file(item) not in changed, _cost(item)))
    for item in items:
        own = item.get_closest_marker("timeout")
        seconds = own.args[0] if own else max([tiers.TIMEOUT_S, *_limits(item)])
        item.add_marker(pytest.mark.timeout(deadline(seconds)), append=False)


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of changed files and of the share, where either was asked for."""
    share, changed = config.getoption("--shard"), _changed(config)
    if share is None and not changed:
        return
    wanted = set(changed)
    if share is not None:
        k, n = map(int, share.split("/"))
        wanted |= set(sorted({_file(item) for item in items})[k::n])
    if config.getoption("--turn") is not None:
        wanted.update(tiers.ROTATING)
    left = [item for item in items if _file(item) not in wanted]
    items[:] = [item for item in items if _file(item) in wanted]
    config.hook.pytest_deselected(items=left)


def _changed(config: pytest.Config) -> list[str]:
    return [file for file in (config.getoption("--changed") or "").split(",") if file]


def _file(item: pytest.Item) -> str:
    return str(item.path.relative_to(item.config.rootpath))


def _cost(item: pytest.Item) -> int:
    """The later, the dearer."""
    kinds = ("processes", "engine", "ranks", "cluster", "slow", "nightly")
    return max((i for i, kind in enumerate(kinds, 1) if item.get_closest_marker(kind)), default=0)


def _limits(item: pytest.Item) -> list[int]:
    return [seconds for kind, seconds in tiers.TIMEOUTS_S.items() if item.get_closest_marker(kind)]


def _shuffle(items: list[pytest.Item], seed: int) -> None:
    """Files in random order, and the tests of a file, which share fixtures, in random order."""
    draw = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    items[:] = [item for group in groups for item in group]


@pytest.hookimpl(tryfirst=True)  # before any fixture starts something
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() + _needs_s(item) > until:
        pytest.skip(NOT_STARTED)


def _needs_s(item: pytest.Item) -> float:
    """The seconds that must be left for a test to start: none, but a third of its limit for one
    whose limit is above those of all kinds, as it takes minutes."""
    limit = item.get_closest_marker("timeout").args[0]
    return limit / 3 if limit > deadline(max(tiers.TIMEOUTS_S.values())) else 0.0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    item.stash[BEGAN] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.when == "teardown":  # by which shared fixtures of the last test have ended
        report.user_properties.append((CPU_S, _cpu_s() - item.stash[BEGAN]))
    return report


BEGAN = pytest.StashKey[float]()
CROWDED = 4.0  # seconds by the clock for one of the processor; two test programs have 2


def _cpu_s() -> float:
    """Of this process, of its children that have ended and were waited for, and what fixtures
    counted of other processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return charged() + sum(usage.ru_utime + usage.ru_stime for usage in used)


def _crowded() -> bool:
    """Other programs share the processors, beside which tests cost more than alone."""
    return slowness().wall > CROWDED * slowness().cpu


class _Status:
    """Records how the test files that docs/status.md names ended, in slow and nightly tiers."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._ended: dict[str, bool] = {}  # file -> all its tests passed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[0]
        if report.failed or (report.passed and report.when == "call"):
            self._ended[name] = report.passed and self._ended.get(name, True)

    def pytest_sessionfinish(self) -> None:
        from benchmarks import status  # of benchmarks/, where suites of these tiers run

        file = self._file or status.FILE
        for line in status.lines(file):
            passed = self._ended.get(line["by"])
            if passed is not None and line["where"] != "nowhere":
                run = status.this_run("passed" if passed else "failed")
                status.record(**{**line, **run}, file=file)


class _Account:
    """Adds up what tests cost, in the process that reports; workers report to it."""

    def __init__(self, config: pytest.Config) -> None:
        self._part = config.getoption("--budget")
        self._worker = hasattr(config, "workerinput")
        self.costs: dict[str, float] = {}  # test -> seconds of the reference machine
        self.not_started: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == CPU_S:
                self.costs[report.nodeid] = value / slowness().cpu
        if report.skipped and NOT_STARTED in str(report.longrepr):
            self.not_started.append(report.nodeid)

    @property
    def overspent(self) -> str:
        """The sentence about a part above its budget, or ""."""
        total = sum(self.costs.values())
        if self._part is None or total <= tiers.PARTS[self._part].cpu_s:
            return ""
        dearest = sorted(self.costs.items(), key=lambda pair: -pair[1])[:10]
        return (
            f"The tests of {self._part} took {total:.0f} s of processor time, above their budget "
            f"of {tiers.PARTS[self._part].cpu_s:.0f} s (tests/tiers.py); the dearest are "
            + ", ".join(f"{name} ({cost:.0f} s)" for name, cost in dearest)
            + "."
            + (" Other programs keep this machine busy, so that it is no failure." * _crowded())
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        failed = self.overspent and not self._worker and not _crowded()
        if failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        write(
            f"{sum(self.costs.values()):.0f} s of processor time on the reference machine; this "
            f"one takes {slowness().cpu:.2f} times as much, and {slowness().wall:.2f} by the clock"
        )
        for name in self.not_started:
            write(f"{NOT_STARTED}: {name}")
        if self.overspent:
            write(self.overspent, red=True)
