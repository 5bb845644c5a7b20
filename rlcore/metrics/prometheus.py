"""A run's metrics for a Prometheus server: an HTTP endpoint of the process that drives the run."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlcore.errors import UserError
from rlcore.metrics.names import declared, split_kind
from rlcore.metrics.rows import Row
from rlcore.metrics.sinks import Sink

CLOSE_S = 5.0
# What is shown of each rollout actor: key of its state -> meaning
ACTOR_GAUGES = {
    "up": "1 if the actor's process is started and has not failed, else 0",
    "in_rotation": "1 if the actor may be given work, else 0",
    "version": "version of the weights that the actor serves (steps)",
    "groups": "groups assigned to the actor (groups)",
    "running": "requests that the actor's engine decodes (requests)",
    "waiting": "requests queued in the actor's engine (requests)",
    "heartbeat_age_s": "since the actor's engine thread last turned (s)",
}


def exported_name(name: str) -> str:
    """A metric's name in Prometheus: "time/step_s" becomes "rlcore_time_step_s"."""
    return "rlcore_" + re.sub(r"\W", "_", name, flags=re.ASCII)


class RunCollector(Collector):
    """Collects the newest row, sums over rows, the run's activity, and its actors.

    A metric that is declared with the reduction "sum" is a counter since the command was started,
    every other one a gauge with the newest row's value.
    """

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self._lock = threading.Lock()
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._row: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._row_at = time.time()  # the command's start counts as a sign of life
        self._attempts = 0
        self._notes = 0
        self._activity = ("start", time.time())
        self._actors: Sequence[Mapping[str, Any]] = ()

    def row(self, row: Row) -> None:
        """Record the row of a step."""
        with self._lock:
            for name, value in row.items():
                if value is None:
                    continue
                metric = declared(name)
                if metric is not None and metric.reduction == "sum":
                    self._sums[name] = self._sums.get(name, 0.0) + value
                else:
                    self._row[name] = float(value)
            self._row_at = time.time()

    def attempt(self) -> None:
        """Record that the run starts, or starts again from a checkpoint."""
        with self._lock:
            self._attempts += 1

    def note(self) -> None:
        """Record that a line was reported to the user."""
        with self._lock:
            self._notes += 1

    def activity(self, name: str) -> None:
        """Record the run's new activity."""
        with self._lock:
            if name != self._activity[0]:
                self._activity = (name, time.time())

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        """Record the rollout actors' present states."""
        with self._lock:
            self._actors = list(actors)

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape, in a thread of the server."""
        with self._lock:
            families = [*self._of_rows(), *self._of_run(), *self._of_actors()]
        yield from families

    def _of_rows(self) -> Iterator[Metric]:
        yield from _families(GaugeMetricFamily, self._row)
        yield from _families(CounterMetricFamily, self._sums)

    def _of_run(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("rlcore_run", "the run, by its directory", labels=["run_dir"])
        info.add_metric([str(self._run_dir)], 1)
        yield info
        name, since = self._activity
        phase = GaugeMetricFamily(
            "rlcore_phase_since_seconds",
            "when the run began what it does now (Unix time, s)",
            labels=["phase"],
        )
        phase.add_metric([name], since)
        yield phase
        yield GaugeMetricFamily(
            "rlcore_planned_steps", "optimizer steps of the run (steps)", value=self._total_steps
        )
        yield GaugeMetricFamily(
            "rlcore_last_step_seconds",
            "when the last step was reported, or the command started (Unix time, s)",
            value=self._row_at,
        )
        yield CounterMetricFamily(
            "rlcore_attempts", "starts of the run's processes, recoveries included", self._attempts
        )
        yield CounterMetricFamily(
            "rlcore_notes", "lines about the run's progress and faults", self._notes
        )

    def _of_actors(self) -> Iterator[Metric]:
        for key, meaning in ACTOR_GAUGES.items():
            family = GaugeMetricFamily(f"rlcore_actor_{key}", meaning, labels=["actor"])
            for actor in self._actors:
                if key in actor:
                    family.add_metric([str(actor["name"])], float(actor[key]))
            yield family


def _families(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily], values: Mapping[str, float]
) -> Iterator[Metric]:
    """One family a metric; where it exists by kind of actors, with the label `kind`, "" pooled."""
    found: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        pooled, kind = split_kind(name)
        found.setdefault(pooled, {})[kind] = value
    for pooled, by_kind in found.items():
        if [*by_kind] == [""]:
            yield family(exported_name(pooled), _help(pooled), value=by_kind[""])
            continue
        made = family(exported_name(pooled), _help(pooled), labels=["kind"])
        for kind, value in by_kind.items():
            made.add_metric([kind], value)
        yield made


def _help(name: str) -> str:
    metric = declared(name)
    return name if metric is None else f"{name}: {metric.meaning} ({metric.unit})"


class PrometheusSink(Sink):
    """Serves a run's metrics over HTTP until it is closed."""

    title = "the Prometheus endpoint (logging.prometheus_port)"
    in_folder = False

    def __init__(self, run_dir: Path, total_steps: int, *, host: str, port: int) -> None:
        """Raises UserError for an address that cannot be listened on."""
        self._collector = RunCollector(run_dir, total_steps)
        registry = CollectorRegistry()
        registry.register(self._collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as e:
            raise _refusal(host, port, e) from e
        self._closed = False

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def log(self, row: Row) -> None:
        self._collector.row(row)

    def note(self, text: str) -> None:
        self._collector.note()

    def activity(self, name: str, waits_for: str, step: int) -> None:
        self._collector.activity(name)

    def fleet(self, actors: Sequence[Mapping[str, Any]]) -> None:
        self._collector.fleet(actors)

    def resume_at(self, step: int) -> None:
        self._collector.attempt()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)


def require_free(host: str, port: int) -> None:
    """Raise UserError for an address that cannot be listened on."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            # as the server will: a port that a command has just left is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as e:
        raise _refusal(host, port, e) from e


def _refusal(host: str, port: int, error: Exception) -> UserError:
    """Make the error that names an address that cannot be listened on."""
    why = getattr(error, "strerror", None) or str(error)
    return UserError(
        f"logging.prometheus_port={port} cannot be listened on at logging.prometheus_host={host} "
        f"({why}): choose another port, or 0 for no endpoint."
    )
