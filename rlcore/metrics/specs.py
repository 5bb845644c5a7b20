"""Settings of a run's logging, warnings and recordings. No torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from rlcore.spec import Spec, Unread, setting


class WarningsSpec(Spec):
    """The bounds beyond which a run warns, once each, that something is likely to be wrong
    (`metrics/rules/`), by the newest steps or by a window of them.

    Bounds are off at 0; bounds of shares that should be small, at 1.
    """

    window: int = setting(20, "steps that slow rules judge by", unit="steps", gt=0)
    answer_kl: float = setting(
        2.0,
        "warn of samples further from the policy, in 2 of 3 steps: k3 above fresh samples' k3, "
        "times the tokens of an answer, at most 128",
        unit="nats",
        ge=0,
    )
    ess: float = setting(0.5, "warn of a mismatch/ess below, in 2 of 3 steps", ge=0, le=1)
    fallen: float = setting(
        0.7, "warn of rewards of 3 steps below this share of the run's best 10 steps", ge=0, le=1
    )
    heldout: float = setting(
        2.0, "warn of a held-out result so far below the first", unit="standard errors", ge=0
    )
    cut_off: float = setting(
        0.5,
        "warn of so large a share of answers cut off at their limit, over 3 steps",
        ge=0,
        le=1,
    )
    no_signal: float = setting(
        0.95,
        "warn of a larger share of groups with equal rewards, or a gradient of 0, over 3 steps",
        ge=0,
        le=1,
    )
    entropy: float = setting(0.01, "warn of an entropy below in 3 steps", unit="nats", ge=0)
    entropy_rise: float = setting(
        4.0, "warn of an entropy above so many times the first 3 steps', without gain", ge=0
    )
    length: float = setting(
        0.2, "warn of answers below this share of the first 3 steps' length, without gain", ge=0
    )
    acceptance: float = setting(0.8, "warn of a mean mismatch/acceptance below", ge=0, le=1)
    clip_share: float = setting(
        0.3, "warn of a larger share of tokens clipped by the policy loss", ge=0, le=1
    )
    staleness_share: float = setting(
        0.9,
        "warn of a mean staleness/mean above this share of a bound that is 2 steps or more",
        ge=0,
        le=1,
    )
    learner_idle: float = setting(
        0.75, "warn of a learner idle for want of data for a larger share of the time", ge=0, le=1
    )
    engine_idle: float = setting(
        0.5, "warn of engines that do not decode for a larger share of the time", ge=0, le=1
    )
    failed_scores: float = setting(
        0.01, "warn of a larger share of samples whose score failed or timed out", ge=0, le=1
    )
    flat_steps: int = setting(
        200, "warn of rewards that have not risen over so many steps; 0: off", unit="steps", ge=0
    )


class RecorderSpec(Spec):
    """The batches that are kept on disk for `rlcore replay`."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("max_gib",), lambda spec: not spec.steps, "steps=0 keeps no batches"),
    )

    steps: int = setting(
        4, "re-execute any of at least so many last steps; 0: keep no batches", unit="steps", ge=0
    )
    max_gib: float = setting(
        2.0,
        "batches of one learner share at most, and checkpoints kept for warned steps; the oldest "
        "are dropped, warned steps last",
        unit="GiB",
        gt=0,
    )


class LoggingSpec(Spec):
    """Sinks of metrics and samples."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            ("project",), lambda spec: spec.wandb == "disabled", "wandb=disabled has no projects"
        ),
        Unread(
            ("prometheus_host",),
            lambda spec: spec.prometheus_port == 0,
            "prometheus_port=0 serves nothing",
        ),
    )

    console: Literal["live", "plain", "off"] = setting(
        "live", "live table, a line a step, or nothing"
    )
    wandb: Literal["offline", "online", "disabled"] | None = setting(
        None, "offline needs no account; null: offline if the package wandb is installed"
    )
    project: str = setting("rlcore", "project of W&B, MLflow and Trackio")
    entity: str | None = setting(None, "W&B user or team; null: the account's own")
    group: str | None = setting(None, "W&B group of runs, such as the seeds of one setting")
    tags: tuple[str, ...] = setting((), "W&B tags")
    prometheus_port: int = setting(
        0, "serve the metrics over HTTP at this port of the driver; 0: no", ge=0, le=65535
    )
    prometheus_host: str = setting(
        "127.0.0.1", "address that the metrics are served at; loopback reaches this machine alone"
    )
    webhook: str = setting(
        "", "URL that warnings and the run's end are posted to, as JSON with a `text`; empty: none"
    )
    sinks: tuple[str, ...] = setting(
        (),
        "further receivers of the metrics: tensorboard, mlflow, trackio, or file.py:Class of yours "
        "(rlcore.metrics.sinks.Sink)",
        names="code",
    )
    samples_per_step: int = setting(
        4, "groups of each step in samples/: one sample of each, of the first one all", ge=0
    )
    detail: Literal["full", "brief"] = setting(
        "full",
        "full: percentiles, parts of times and of the mismatch go to details.jsonl and to every "
        "tracker; brief: nowhere",
    )
    report: bool = setting(True, "write report.html at the end")
    warnings: WarningsSpec = WarningsSpec()
    recorder: RecorderSpec = RecorderSpec()
