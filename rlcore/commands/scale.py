"""`rlcore scale`: change the number of rollout actors of a running job, through a file in its run
directory."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlcore.commands.owner import living_owner
from rlcore.config.compose import recorded
from rlcore.config.schema import RunConfig
from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.files import replace_file
from rlcore.metrics.log import NAME
from rlcore.spec import refuse

CONTROL = Path("control") / "actors.json"  # {"request": "5f0c...", "counts": {"bf16": 4}}
ANSWER = Path("control") / "answer.json"  # {"request": "5f0c...", "refused": ""}
MOST = 10_000  # actors of a label: a larger number is a mistake
ANSWER_S = 120.0  # for the run to read a request
POLL_S = 0.2


def scale(
    run_dir: str | Path,
    counts: Mapping[str, int],
    *,
    timeout_s: float = ANSWER_S,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Ask the run in `run_dir` for this many actors of each label, and wait for its answer.

    Raises UserError if no run is going on there, it has no such labels, or it refuses; and
    DeadlineExceeded, the request withdrawn, if it has not answered by then.
    """
    refuse(not counts, "rlcore scale needs a number, for example actor.bf16.count=2.")
    folder = Path(run_dir)
    _require_running(folder)
    labels = [key.split(".")[1] for key in recorded(folder) if _names_count(key.split("."))]
    for label, count in counts.items():
        if label not in labels:
            raise UserError.choice("actor", label, labels, f"{run_dir} has no such actors")
        refuse(
            not 1 <= count <= MOST,
            f"actor.{label}.count={count} is not accepted: give a number from 1 to {MOST}.",
        )
    # A file needs no open port, and works wherever the run directory can be seen.
    request = secrets.token_hex(8)
    path = folder / CONTROL
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps({"request": request, "counts": dict(counts)}))
    refused = _answer(folder, request, timeout_s, sleep)
    refuse(bool(refused), f"The run refuses this: {refused}")
    print("the run adds and removes actors as asked; its console and log say when each is at work")
    return 0


def _require_running(folder: Path) -> None:
    refuse(not (folder / "config.yaml").is_file(), f"run_dir={folder} holds no run.")
    owner = living_owner(folder)
    refuse(
        owner is None or owner.command != "rlcore train",
        f"run_dir={folder}: no run is going on there"
        f"{'' if owner is None else f', but {owner}'}; a run that is started again is given its "
        "actors by actor.LABEL.count.",
    )


def _answer(folder: Path, request: str, timeout_s: float, sleep: Callable[[float], None]) -> str:
    """The sentence with which a run refuses a request, or ""."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = _document(folder / ANSWER)
        if found.get("request") == request:
            return str(found.get("refused", ""))
        asked = _document(folder / CONTROL).get("request", request)
        if asked != request:
            raise StageError("another rlcore scale has replaced this request before it was read")
        if time.monotonic() >= deadline:
            (folder / CONTROL).unlink(missing_ok=True)
            raise DeadlineExceeded(
                f"the run has not read the request for {timeout_s:g} s, and it is withdrawn: a run "
                f"reads one every cluster.heartbeat_s once its processes are up; {folder / NAME} "
                "says what it does"
            )
        sleep(POLL_S)


def _document(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _names_count(parts: list[str]) -> bool:
    return len(parts) == 3 and (parts[0], parts[2]) == ("actor", "count")


class ScaleRequests:
    """Requests for another number of actors, each read once and answered.

    A new command starts with the counts of its configuration; within one, the fleet's size survives
    recoveries.
    """

    def __init__(self, run_dir: Path) -> None:
        self._sizes: dict[str, int] = {}  # actors of each label when the last attempt ended
        self._again: dict[str, int] | None = None  # asked of the next attempt once it runs
        self._path = run_dir / CONTROL
        self._answers = run_dir / ANSWER
        self._request = ""  # that was read and not answered
        self._unread = ""  # why the file could not be read, as it was said
        for path in (self._path, self._answers):  # of an earlier command on this run
            if path.is_file():
                path.unlink()

    def __call__(self) -> dict[str, int] | None:
        """The counts of a request that has not been read yet, or None. Raises UserError for a
        malformed request, once each."""
        try:
            counts = self._read()
        except UserError as e:
            said, self._unread = self._unread, str(e)
            if said == self._unread:
                return None
            raise
        self._unread = ""
        again, self._again = self._again, None
        return again if counts is None else (again or {}) | counts

    def _read(self) -> dict[str, int] | None:
        try:
            text = self._path.read_text()
            self._path.unlink()  # read once
            found = json.loads(text)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise UserError(f"{self._path} cannot be read: {e.strerror}.") from e
        except (ValueError, RecursionError) as e:
            raise UserError(f"{self._path} was not JSON: use rlcore scale.") from e
        counts = found.get("counts") if isinstance(found, dict) else None
        refuse(
            not isinstance(counts, dict) or not counts,
            f"{self._path} held no counts by label: use rlcore scale.",
        )
        assert isinstance(counts, dict)
        self._request = str(found.get("request", ""))
        for label, count in counts.items():
            refuse(
                type(count) is not int or not 0 <= count <= MOST,
                f"{self._path}: actor.{label}.count={json.dumps(count)[:40]} is not a number from "
                f"0 to {MOST}.",
            )
        return dict(counts)

    def answer(self, refused: str) -> None:
        """Answer the request that was read last; `refused`: why, or "" if it is followed."""
        request, self._request = self._request, ""
        if not request:
            return
        try:
            replace_file(self._answers, json.dumps({"request": request, "refused": refused}))
        except OSError:
            return  # the run's note is written, and the asking command has a deadline

    def keep(self, sizes: Mapping[str, int]) -> None:
        """Note how many actors of each label an attempt ended with."""
        self._sizes = dict(sizes)

    def start_with(self, config: RunConfig) -> RunConfig:
        """The configuration that an attempt starts with; the difference from the kept counts is
        requested again. A fleet that had shrunk starts small. A fleet that had grown grows again
        while it works: the cluster may lack resources yet, and the run was checked to fit with the
        counts of its configuration.
        """
        sizes = {label: self._sizes.get(label, a.count) for label, a in config.actor.items()}
        # At least one: a label without actors could not be published to, or grow again.
        starting = {
            label: max(1, min(actor.count, sizes[label])) for label, actor in config.actor.items()
        }
        self._again = {label: n for label, n in sizes.items() if n != starting[label]} or None
        actors = {
            label: a.model_copy(update={"count": starting[label]})
            for label, a in config.actor.items()
        }
        return config.model_copy(update={"actor": actors})
