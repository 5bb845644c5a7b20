"""Settings of what a run shows and records. No torch."""

from __future__ import annotations

from typing import Literal

from rlcore.spec import Spec, setting


class LoggingSpec(Spec):
    """Sinks of metrics and samples."""

    console: Literal["live", "plain", "off"] = setting(
        "live", "live table, a line a step, or nothing"
    )
    wandb: Literal["offline", "online", "disabled"] = setting("offline", "offline needs no account")
    project: str = setting("rlcore", "W&B project")
    prometheus_port: int = setting(
        0, "serve the metrics over HTTP at this port of the driver; 0: no", ge=0, le=65535
    )
    prometheus_host: str = setting(
        "127.0.0.1", "address that the metrics are served at; loopback reaches this machine alone"
    )
    samples_per_step: int = setting(4, "decoded trajectories kept each step under samples/", ge=0)
    report: bool = setting(True, "write report.html at the end")
