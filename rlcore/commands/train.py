"""`rlcore train`: from a checked configuration to a finished, resumable run."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.cluster.process_tuning import short_passes
from rlcore.cluster.ray_cluster import idle_gpus
from rlcore.cluster.specs import joined_address
from rlcore.commands import derived
from rlcore.commands.about import kernel_news, limit_facts, note_in_about, run_kernels, write_about
from rlcore.commands.collapsed import go_back, slowed
from rlcore.commands.derived import health_of
from rlcore.commands.memory import stored_bytes
from rlcore.commands.owner import Owner
from rlcore.commands.preflight import Prepared, open_run_dir
from rlcore.commands.processes import Session, connected
from rlcore.commands.scale import ScaleRequests
from rlcore.commands.start_checks import check
from rlcore.commands.warm_up import starting_model, with_drafts
from rlcore.config.compose import check_resume, other_threads, to_yaml
from rlcore.config.schema import RunConfig
from rlcore.config.unread import unread
from rlcore.errors import (
    Collapsed,
    DeadlineExceeded,
    OwnershipLost,
    RoleLost,
    StageError,
    UserError,
)
from rlcore.files import replace_file
from rlcore.interfaces import Callback
from rlcore.loop import checkpoint
from rlcore.loop.controller import Controller
from rlcore.loop.dispatcher import LoopParts
from rlcore.loop.evaluation import Evaluator
from rlcore.loop.run_plan import Progress
from rlcore.loop.saver import Saver
from rlcore.metrics.health import RunVerdict
from rlcore.metrics.log import NAME as LOG
from rlcore.metrics.logger import MetricsLogger, RunReporter, open_logger
from rlcore.metrics.names import is_accuracy
from rlcore.metrics.rows import Row
from rlcore.metrics.sinks import CallbackSink
from rlcore.rooms import from_room

TOGETHER_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


# Signals that end a run: SIGINT (Ctrl-C), SIGTERM, and SIGUSR1, which Slurm's --signal often names.
#
# Supervisors often signal a process twice at once: coreutils' timeout its child and then the group,
# Slurm each step and the batch script, a terminal with a bouncing key. Signals within a few seconds
# of the first are therefore one request; only a later one stops at once. In a Slurm job only Ctrl-C
# does: Slurm repeats its SIGTERM when a grace time ends, half a minute before SIGKILL.


class StopSignals:
    """The requests to stop that the signals of one command have made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None
        self._controller: Controller | None = None

    def ask(self) -> None:
        """Ask the run to end after the present step, as a first signal does; from any thread."""
        if not self.requested:
            self.repeated()
        if self._controller is not None:
            self._controller.request_stop()

    @property
    def requested(self) -> bool:
        """True if a signal has asked the run to end."""
        return self._first is not None

    def repeated(self, number: int = signal.SIGTERM) -> bool:
        """Note a signal; returns whether it is a repetition of the first, which is already acted
        on."""
        now = self._clock()
        if self._first is None:
            self._first = now
            return False
        by_slurm = number != signal.SIGINT and "SLURM_JOB_ID" in os.environ
        return by_slurm or now - self._first < TOGETHER_S

    def interrupt(self) -> None:
        """Have both signals raise KeyboardInterrupt.

        For the time outside the loop, while processes start or end: they are ended, with exit code
        130. A repeated signal must not interrupt that. Without effect outside the main thread.
        """

        def raise_once(number: int, frame: object) -> None:
            if not self.repeated(number):
                raise KeyboardInterrupt

        # Tests and embedding programs may run a command in another thread, which gets no signals.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, raise_once)

    def listen(self, controller: Controller, note: Callable[[str], None]) -> None:
        """While the running event loop lasts, the first signal ends the run after the current step
        with a checkpoint, and a later one at once, by cancelling the current task."""
        self._controller = controller
        if self.requested:  # before there was a controller
            controller.request_stop()
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread gets signals
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None

        def stop(number: signal.Signals) -> None:
            if self.requested:
                if not self.repeated(number):
                    main.cancel()
                return
            self.repeated()
            note(
                f"{number.name}: finishing the current step, then a checkpoint (press again later "
                "to stop now)"
            )
            controller.request_stop()

        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)


STOPPED = 130  # exit code of a run that was stopped and left a checkpoint


@dataclass(frozen=True, slots=True)
class RunContext:
    """The state that all attempts of one command share."""

    given: RunConfig  # as it was composed: a resumed run is composed from it
    prepared: Prepared
    logger: MetricsLogger
    reporter: RunReporter
    scale: ScaleRequests
    stop: StopSignals
    owner: Owner

    @property
    def config(self) -> RunConfig:
        """As the model can take it."""
        return self.prepared.config

    @property
    def folder(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@dataclass(frozen=True, slots=True)
class Start:
    """Where an attempt begins: at a checkpoint, or from nothing."""

    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)  # the checkpoint's own
    progress: Progress = field(default_factory=Progress)


def train(
    config: RunConfig, callbacks: Sequence[Callback] = (), stop: StopSignals | None = None
) -> int:
    """Run to the end of the schedule. Returns the exit code; raises UserError before anything is
    started. `stop`: requests to end the run that come from elsewhere than signals."""
    # Every refusal comes before the run directory: a wrong command leaves nothing behind.
    config = derived.with_stated_threads(config)
    prepared = check(config)
    with open_run_dir(config, "rlcore train") as owner, _errors_name_the_log(owner):
        kernels = run_kernels(config)
        said = [*kernel_news(config, kernels)]
        limit = limit_facts(prepared.config, prepared.tokenizer, kernels)
        write_about(owner.folder, kernels, limit)
        swept = checkpoint.sweep(owner.folder / "checkpoints")
        with open_logger(
            owner.folder,
            config.logging,
            config=config.model_dump(mode="json"),
            total_steps=config.schedule.steps,
            health=health_of(config),
            guard=owner.require,
        ) as logger:
            logger.reference = prepared.reference
            reporter, scale = RunReporter(logger), ScaleRequests(owner.folder)
            stop = stop or StopSignals()
            run = RunContext(config, prepared, logger, reporter, scale, stop, owner)
            if callbacks:
                logger.sinks.append(CallbackSink(owner.folder, callbacks, stop.ask))
            run.stop.interrupt()
            warned = [*derived.cautions(config), *unread(config)]
            for news in (owner.news, swept, derived.idle_clip(config), *warned, *said):
                if news:
                    reporter.note(news)
            try:
                progress = _recovering(run)
                summary = {"steps": progress.step, "seconds": progress.seconds}
                logger.finish({**summary, **_stopped(config, progress.step)})
            finally:
                # Also after a failure, whose cause the report helps to find.
                if config.logging.report and (owner.folder / "metrics.jsonl").exists():
                    _report(run)
    return STOPPED if progress.step < config.schedule.steps else 0


def _stopped(config: RunConfig, step: int) -> dict[str, str]:
    """The line of a run that ended early, with the command that goes on."""
    steps = config.schedule.steps
    if step >= steps:
        return {}
    words = f"run_dir={shlex.quote(config.run_dir)} resume=auto"
    return {
        "stopped": f"Stopped after step {step} of {steps}, with a checkpoint; it goes on with: "
        f"rlcore train {words}"
    }


@contextmanager
def _errors_name_the_log(owner: Owner) -> Iterator[None]:
    try:
        yield
    except Collapsed:  # its sentence says how to go on
        raise
    except (StageError, DeadlineExceeded) as e:
        log = owner.folder / LOG
        raise type(e)(f"{str(e).rstrip('.')}; {log} has the run's log") from e


def _report(run: RunContext) -> None:
    """report.html; a disk that refuses it does not make a failure of the run."""
    try:
        run.owner.require()
        health = health_of(run.given)

        def judge(_: Path, rows: Sequence[Row]) -> RunVerdict:
            health.resume(rows)
            return health.verdict()

        from_room("write_report")(run.folder, judge=judge)
    except (OSError, UserError, OwnershipLost) as e:
        run.reporter.note(f"report.html could not be written (logging.report): {e}")


def _recovering(run: RunContext) -> Progress:
    """Make attempts until one succeeds: a lost process costs the steps since the last checkpoint,
    not the run. Raises StageError once recoveries from one checkpoint are used up."""
    spec, note = run.config.cluster, run.reporter.note
    resume, patience_s = run.config.resume == "auto", 0.0
    recoveries, recovered_at = 0, 0  # how often in a row the run went on from which step
    while True:
        start = _start_point(run) if resume else Start()
        began_at = start.progress.step
        if began_at >= run.config.schedule.steps:
            note(
                f"nothing to do: the run has {began_at} of schedule.steps="
                f"{run.config.schedule.steps} steps"
            )
            return start.progress
        # Rows and samples beyond the checkpoint come again.
        run.logger.resume_at(began_at)
        # Before anything starts, so that even a run that dies at once can be resumed.
        replace_file(run.folder / "config.yaml", to_yaml(run.given))
        try:
            return _attempt(run, start, patience_s)
        except Collapsed as e:
            if run.stop.requested:
                raise
            note(go_back(run.config, e))
        except RoleLost as e:
            if run.stop.requested:
                # A user who stopped the run does not wait for another start.
                raise StageError(
                    f"{e}, after the run was told to stop; the last checkpoint stands"
                ) from e
            recoveries = recoveries + 1 if began_at == recovered_at else 1
            recovered_at = began_at
            limit = f"cluster.max_recoveries={spec.max_recoveries}"
            if recoveries > spec.max_recoveries:
                raise StageError(f"{e} ({limit} are used up)") from e
            note(f"{e}: recovery {recoveries} of {limit}")
        # Lost resources may take a while to come back.
        resume, patience_s = True, spec.start_timeout_s
        # A start without a checkpoint begins with the first prompt again.
        run.prepared.prompts.begin_anew()


def _start_point(run: RunContext) -> Start:
    """The newest valid checkpoint, or the beginning if the run has written none yet.

    Raises UserError if the run cannot go on from it as it is configured.
    """
    found = checkpoint.resume_from(run.checkpoints, run.reporter.note)
    if found is None:
        return Start()
    check_resume(run.given)
    if changed := other_threads(run.given):
        run.reporter.note(changed)
    state = checkpoint.state_of(found)
    progress = Progress(**state["progress"])
    derived.plan(run.config).check_resume(progress)
    run.prepared.prompts.restore(state["prompts"])  # refuses another mixture
    return Start(found, state, progress)


def _attempt(run: RunContext, start: Start, patience_s: float) -> Progress:
    """The part of a run that needs processes; none of them remains when it returns or raises.

    `patience_s`: how long a cluster that was joined before may take to free resources.
    """
    reporter, prepared = run.reporter, run.prepared
    note = reporter.note
    config = slowed(run.scale.start_with(run.config))
    size = stored_bytes(config, prepared.tokenizer)
    with connected(config, store_bytes=size, patience_s=patience_s, stderr=run.logger.stderr):
        reporter.activity("start", "the processes to answer", start.progress.step)
        # A checkpoint continues the model it was made of, whatever model.path says by now.
        kept = start.state.get("model_path")
        model_path = str(kept) if kept else starting_model(config, prepared, note)
        config = with_drafts(config, prepared, note)
        for line in prepared.remarks:
            note(line)
        if joined_address(config.cluster.address) is not None:
            for line in idle_gpus(derived.needed(config)[1]):
                note(line)
        for label, actor in config.actor.items():
            note(derived.describe_actor(label, actor, config.model.max_len))
        began = time.monotonic()
        session = Session(config, model_path, pad_id=prepared.pad_id, note=note)
        assert session.fleet is not None
        try:
            note(
                f"{len(session.fleet.members)} rollout actors and {derived.ranks(config)} learner "
                f"ranks are up after {time.monotonic() - began:.0f} s"
            )
            assert session.learner is not None
            shortcuts = session.learner.shortcuts()
            for line in shortcuts:
                note(line)
            note_in_about(run.folder, shortcuts=shortcuts)
            if start.checkpoint is not None:
                session.restore(start.checkpoint)
                prepared.prompts.restore(start.state["prompts"])
                note(f"continuing from {start.checkpoint.name}")
            with short_passes():
                asyncio.run(_loop(run, session, model_path, start))
            return start.progress
        except asyncio.CancelledError as e:  # a second signal
            raise KeyboardInterrupt from e
        finally:
            run.stop.interrupt()  # the event loop has removed its own handlers
            run.scale.keep(session.fleet.sizes())
            session.close()


async def _loop(run: RunContext, session: Session, model_path: str, start: Start) -> None:
    """Train until the plan's end or a stop; updates `start.progress`."""
    config, prepared, reporter = run.config, run.prepared, run.reporter
    clients, fleet = session.clients(), session.fleet
    assert fleet is not None
    parts = LoopParts(
        fleet,
        prepared.requests,
        Evaluator(
            config.evaluation,
            prepared.heldout,
            fleet,
            clients.scorer,
            reporter.evaluation_samples,
        ),
        Saver(
            config.checkpoint,
            run.checkpoints,
            {"model_path": model_path, "seed": config.seed},
            note=reporter.note,
            is_accuracy=is_accuracy,
            guard=run.owner.require,
        ),
        reporter,
        run.scale,
        run.scale.answer,
    )
    resumed_from = str(start.checkpoint / "learner") if start.checkpoint else None
    controller = Controller(
        derived.plan(config), clients, parts, progress=start.progress, resumed_from=resumed_from
    )
    run.stop.listen(controller, reporter.note)
    await controller.run()
