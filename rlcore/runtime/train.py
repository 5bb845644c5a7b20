"""`rlcore train`: from a checked configuration to a finished, resumable run."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.config.compose import to_yaml
from rlcore.config.schema import RunConfig
from rlcore.errors import StageError
from rlcore.metrics.logger import MetricsLogger, open_logger
from rlcore.metrics.report import write_report
from rlcore.runtime import checkpoint, options
from rlcore.runtime.cluster import RoleLost, cluster, get
from rlcore.runtime.controller import Controller
from rlcore.runtime.plan import Progress
from rlcore.runtime.preflight import Prepared, open_run_dir, prepare
from rlcore.runtime.reporting import RunReporter
from rlcore.runtime.saver import RunSaver
from rlcore.runtime.scale import Wanted
from rlcore.runtime.session import Session
from rlcore.runtime.warmup import starting_model, with_drafts

STOPPED = 130  # exit code of a run that was told to stop and left a checkpoint


def train(config: RunConfig) -> int:
    """Run to the end of the schedule. Returns the exit code; raises UserError before anything is started."""
    prepared = prepare(config)
    run_dir = open_run_dir(config)
    with open_logger(
        run_dir,
        console=config.logging.console,
        wandb=config.logging.wandb,
        project=config.logging.project,
        config=config.model_dump(mode="json"),
        total_steps=config.schedule.steps,
    ) as logger:
        reporter = RunReporter(logger)
        wanted = Wanted(run_dir)
        _sigterm_interrupts()
        try:
            progress = _recovering(config, prepared, logger, reporter, run_dir, wanted)
            logger.finish({"steps": progress.step, "seconds": progress.seconds})
        finally:
            if config.logging.report and (run_dir / "metrics.jsonl").exists():
                write_report(run_dir)
    return STOPPED if progress.step < config.schedule.steps else 0


def _recovering(
    config: RunConfig,
    prepared: Prepared,
    logger: MetricsLogger,
    reporter: RunReporter,
    run_dir: Path,
    wanted: Wanted,
) -> Progress:
    """Attempts until one ends: a lost process of the run costs the steps since its last checkpoint, not the run."""
    resume, recoveries, stood, patience_s = config.resume == "auto", 0, 0, 0.0
    while True:
        found = checkpoint.resume_from(run_dir / "checkpoints", reporter.note) if resume else None
        state = checkpoint.state_of(found) if found else None
        progress = Progress(**state["progress"]) if state else Progress()
        if progress.step >= config.schedule.steps:
            reporter.note(f"nothing to do: the run has {progress.step} of schedule.steps={config.schedule.steps} steps")
            return progress
        logger.resume_at(progress.step)
        progress_at = progress.step
        (run_dir / "config.yaml").write_text(to_yaml(config))
        try:
            return _on_cluster(config, prepared, reporter, run_dir, found, state, progress, wanted, patience_s)
        except RoleLost as e:
            if wanted.stop:
                raise StageError(f"{e}, after the run was told to stop; the last checkpoint stands") from e
            recoveries = recoveries + 1 if progress_at == stood else 1
            stood = progress_at
            if recoveries > config.cluster.max_recoveries:
                raise StageError(f"{e} (cluster.max_recoveries={config.cluster.max_recoveries} are used up)") from e
            reporter.note(f"{e}: recovery {recoveries} of cluster.max_recoveries={config.cluster.max_recoveries}")
            resume, patience_s = True, config.cluster.start_timeout_s  # what was lost may take a while to come back
            prepared.prompts.restore({"cursor": 0})


def _on_cluster(
    config: RunConfig,
    prepared: Prepared,
    reporter: RunReporter,
    run_dir: Path,
    found: Path | None,
    state: dict[str, Any] | None,
    progress: Progress,
    wanted: Wanted,
    patience_s: float,
) -> Progress:
    """The part of a run that needs processes; none is left when it returns or raises."""
    config = wanted.start_with(config)
    cpus, gpus = options.needed(config)
    with cluster(
        address=config.cluster.address,
        num_cpus=config.cluster.num_cpus,
        needed_cpus=cpus,
        needed_gpus=gpus,
        object_store_mib=config.cluster.object_store_mib,
        patience_s=patience_s,
    ):
        _sigterm_interrupts()  # Ray has put a handler of its own in place
        model_path = str(state["model_path"]) if state else starting_model(config, prepared, reporter.note)
        config = with_drafts(config, prepared, reporter.note)
        for label, actor in config.actor.items():
            reporter.note(options.describe_actor(label, actor, config.model.max_len))
        started = time.monotonic()
        session = Session(config, model_path, pad_id=prepared.pad_id, run_dir=run_dir, note=reporter.note)
        try:
            reporter.note(
                f"{len(session.fleet.members)} rollout actors and {len(session.learners)} learner ranks are up "
                f"after {time.monotonic() - started:.0f} s"
            )
            if found is not None and state is not None:
                _restore(session, prepared, found, state)
                reporter.note(f"continuing from {found.name}")
            learner_folder = str(found / "learner") if found else None
            asyncio.run(_run(config, session, prepared, reporter, model_path, progress, learner_folder, wanted))
            return progress
        except asyncio.CancelledError as e:  # a second signal
            raise KeyboardInterrupt from e
        finally:
            _sigterm_interrupts()  # the loop took its own away
            wanted.keep(session.fleet.sizes())
            session.close()


async def _run(
    config: RunConfig,
    session: Session,
    prepared: Prepared,
    reporter: RunReporter,
    model_path: str,
    progress: Progress,
    learner_folder: str | None,
    wanted: Wanted,
) -> None:
    controller = Controller(
        options.plan(config),
        fleet=session.fleet,
        buffer=session.buffer,
        scorer=session.scorer,
        learners=session.learners,
        prompts=prepared.prompts,
        requests=prepared.requests,
        evaluator=session.evaluator(prepared, reporter.evaluation_samples),
        reporter=reporter,
        saver=RunSaver(config, session.run_dir / "checkpoints", model_path, reporter.note),
        progress=progress,
        resumed_from=learner_folder,
        wanted_actors=wanted,
        draft_learners=session.draft_learners,
    )
    _stop_on_signals(controller, wanted, reporter.note)
    await controller.run()


def _sigterm_interrupts() -> None:
    """Outside the loop, while processes start or end, SIGTERM is what Ctrl-C is: they are taken down, exit code 130."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


def _stop_on_signals(controller: Controller, wanted: Wanted, note: Callable[[str], None]) -> None:
    """The first SIGINT or SIGTERM ends the run after the current step with a checkpoint; the second ends it at once."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def stop(name: str) -> None:
        if controller.stop_requested:
            main.cancel()
            return
        note(f"{name}: finishing the current step, then a checkpoint (once more to stop at once)")
        wanted.stop = True
        controller.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number.name)


def _restore(session: Session, prepared: Prepared, folder: Path, state: dict[str, Any]) -> None:
    session.each_learner("load", str(folder / "learner"), what="the learner to load its checkpoint")
    if session.draft_learners:
        what = "the draft's learner to load its checkpoint"
        session.each_learner("load", str(folder / "draft"), what=what, draft=True)
    get(
        session.buffer.load.remote(str(folder / "buffer")),
        timeout_s=session.timeout_s,
        what="the buffer to load its journal",
        key="cluster.start_timeout_s",
    )
    prepared.prompts.restore(state["prompts"])
