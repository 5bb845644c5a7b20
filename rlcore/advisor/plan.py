"""`rlcore plan`: forecasts of a fleet, from a configuration and rates, and `measure`, which reads
the rates from finished runs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlcore.advisor import plan_mix
from rlcore.advisor.planner.forecast import Forecast, forecast
from rlcore.advisor.planner.gpus import (
    GPUS,
    SHAPES,
    EngineShape,
    Gpu,
    Shape,
    actor_rates,
    learner_rates,
)
from rlcore.advisor.planner.measure import SPAN, MeasuredRun, measured
from rlcore.advisor.planner.picture import picture
from rlcore.advisor.planner.run import PlannedFleet
from rlcore.advisor.planner.specs import ActorRates, EpisodeSpec, LengthSpec, Rates
from rlcore.commands import derived
from rlcore.config.compose import load
from rlcore.config.parts import PARTS
from rlcore.config.parts.part_facts import NO_WORK, HeldEngine, Work
from rlcore.config.schema import RunConfig
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.metrics.rows import run_rows
from rlcore.models.folder import read_config
from rlcore.models.sizes import folder_parameters
from rlcore.progress import waiting
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse
from rlcore.tasks import make_task
from rlcore.tasks.scoring import Scorer
from rlcore.types import Answer
from rlcore.weights.specs import GROUP_TRANSPORTS

EPISODE_WORDS = ("turns", "given_tokens", "call_s")
GPU_WORDS = ("shape", "prompt_tokens", "median_tokens", "spread", *EPISODE_WORDS)
UNGRADED_S = 1e-9  # a grader's time for an episode that its environment has graded
STEPS = 24  # optimizer steps that are simulated: enough for a steady state
SPLIT_WORDS = ("gpus", "variants", "failures")  # of `plan_split`
ASSUMED = "by manufacturers' figures and assumed shares of them, unproven on a GPU"


def plan(config: RunConfig, words: Mapping[str, str]) -> int:
    """Print a forecast for every number of actors asked for. `words`: the verb's own keys that were
    given (`config/verbs.py`). Raises UserError."""
    stray = next((key for key in SPLIT_WORDS if key in words), None)
    if stray is not None:
        raise UserError(f"{stray}={words[stray]} needs gpus=N, the GPUs that are divided.")
    if "picture" in words and "actors" not in words:
        raise UserError(f"picture={words['picture']} needs actors=1,2,4 or gpus=N to compare.")
    check_source(words, config)
    check_simulated(config)
    kinds = _measured_kinds(config, words)
    fleets = [_fleet(config, words, count) for count in _counts(words, config)]
    source = words.get("rates") or f"{words['gpu']}, {ASSUMED}"
    print(f"rates: {source}\n{HEADER}")
    found: list[tuple[PlannedFleet, Forecast]] = []
    for fleet in fleets:
        with waiting("plan", f"simulating {sum(fleet.actors.values())} actors"):
            result = forecast(fleet)
        print(_line(fleet, result), flush=True)
        found.append((fleet, result))
    for line in _bounded(config, max(f.staleness_mean for _, f in found)):
        print(line)
    if len(config.actor) > 1:
        print("\n".join([plan_mix.UNKNOWN] if kinds is None else _mix(config, words, kinds)))
    if "out" in words:
        rows = [{"actors": dict(fleet.actors), **f.as_row()} for fleet, f in found]
        Path(words["out"]).write_text(json.dumps(rows, indent=1) + "\n")
    if "picture" in words:
        Path(words["picture"]).write_text(_picture(found))
    return 0


def _measured_kinds(config: RunConfig, words: Mapping[str, str]) -> plan_mix.Rates | None:
    """Kinds as the runs of `kinds=` measured them; None without the word. Raises UserError."""
    if "kinds" not in words:
        return None
    refuse(
        len(config.actor) == 1,
        f"kinds={words['kinds']} advises a mix, and actor=[{','.join(config.actor)}] is one kind.",
    )
    return plan_mix.measured_kinds(words["kinds"], config)


def _mix(config: RunConfig, words: Mapping[str, str], kinds: plan_mix.Rates) -> Iterator[str]:
    """Lines of the advised mix. GPUs' rates differ by kind, and replace the measured ones; a file
    of rates has one for all kinds."""
    if "rates" in words:
        yield from plan_mix.advised(kinds, f"as measured in {words['kinds']}")
        return
    by_label, rates = _rates(config, words)
    alone = {
        label: forecast(planned(config, {label: actor.count}, by_label, rates))
        for label, actor in config.actor.items()
    }
    origin = f"at the pace forecast for {words['gpu']}, with tails measured in {words['kinds']}"
    yield from plan_mix.advised(plan_mix.at_forecast(kinds, alone, config), origin)


def _picture(found: Sequence[tuple[PlannedFleet, Forecast]]) -> str:
    """Throughput by the number of actors, as SVG."""
    counts = [float(sum(fleet.actors.values())) for fleet, _ in found]
    curves = {
        "sampled": [(n, f.rollout_tokens_per_s) for n, (_, f) in zip(counts, found)],
        "trained on": [(n, f.train_tokens_per_s) for n, (_, f) in zip(counts, found)],
    }
    return picture("tokens per second", "actors", "tokens/s", curves)


def expected(config: RunConfig, words: Mapping[str, str]) -> list[str]:
    """Lines of a dry run on the pace of its run. `words`: the given keys of `config/verbs.py:
    FORECAST`. Raises UserError."""
    if not words:
        return ["none: rates=FILE (of rlcore plan measure) or gpu=NAME gives one"]
    check_source(words, config)
    check_simulated(config)
    f = forecast(_fleet(config, words, None))
    steps = config.schedule.steps
    idle = f"idle: actors {f.actors_idle:.0%}, learner {f.learner_idle:.0%}"
    waits = f"pace set by: {'none alone' if f.bottleneck == 'turns' else f.bottleneck}"
    return [
        f"{f.step_s:.3g} s a step, {steps} steps in {_duration(steps * f.step_s)} without starts, "
        "evaluations and checkpoints",
        f"staleness {f.staleness_mean:.2f} steps in the mean, {f.staleness_max:.0f} at most; "
        f"{f.train_tokens_per_s:,.0f} tokens trained on per second",
        f"{waits}; {idle}",
        *_bounded(config, f.staleness_mean),
    ]


def _bounded(config: RunConfig, age: float) -> list[str]:
    """A line on what lateness does to steps, which a forecast of times does not show."""
    said = derived.steps_in_flight(config)
    if not said:
        return []
    least = f", of which each may take 1/{age + 1:.1f} of that way" if "held" in said else ""
    return [f"{said}{least}; rlcore doctor run=DIR gives the rates once rows show them"]


def _duration(seconds: float) -> str:
    """Example: 5400 -> "1.5 hours" """
    for size, unit in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def check_source(words: Mapping[str, str], config: RunConfig) -> None:
    """Raise UserError for rates that are missing, or are for another kind of run."""
    if ("rates" in words) == ("gpu" in words):
        raise UserError("A forecast takes either rates=FILE or gpu=NAME, and one of them.")
    stray = next((word for word in GPU_WORDS if word in words and "rates" in words), None)
    if stray is not None:
        raise UserError(
            f"{stray}={words[stray]} is for gpu=NAME: the file rates={words['rates']} has its own "
            "lengths and episodes. Change them there."
        )
    if "gpu" in words:
        _check_parts(config, by_gpu=True)


def _check_parts(config: RunConfig, *, by_gpu: bool) -> None:
    """Raise UserError for a part whose time no forecast knows."""
    for part in PARTS:
        why = part.unplanned(config, by_gpu=by_gpu)
        refuse(bool(why), why)


def check_simulated(config: RunConfig) -> None:
    """Raise UserError for runs whose cost is not simulated."""
    refuse(
        config.mixed,
        f"task=[{','.join(config.tasks)}] cannot be planned: a forecast has one size of groups and "
        "one distribution of lengths. Plan each task by itself.",
    )
    refuse(
        config.model.diffusion is not None,
        "model.diffusion cannot be planned: a forecast decodes token by token. Plan a run of a "
        "causal model.",
    )
    _check_parts(config, by_gpu=False)
    for label, actor in config.actor.items():
        refuse(
            actor.speculate is not None,
            f"actor.{label}.speculate cannot be planned: a forecast decodes one token of a request "
            "in a step. Plan the run without it.",
        )
        refuse(
            actor.kv_on_update == "keep" and config.schedule.on_publish == "in_flight",
            f"actor.{label}.kv_on_update=keep cannot be planned: a forecast computes prefixes "
            "again after every publication. Plan the run with kv_on_update=recompute.",
        )


HEADER = (
    "actors                 s/step   sampled/s   trained/s  staleness mean  p90  max"
    "  actors idle  learner idle  graders idle  waits for"
)


def _line(fleet: PlannedFleet, f: Forecast) -> str:
    actors = " ".join(f"{n} {label}" for label, n in fleet.actors.items())
    return (
        f"{actors:20s} {f.step_s:8.3g} {f.rollout_tokens_per_s:11.4g} {f.train_tokens_per_s:11.4g}"
        f" {f.staleness_mean:15.2f} {f.staleness_p90:4.1f} {f.staleness_max:4.0f}"
        f" {f.actors_idle:12.0%} {f.learner_idle:13.0%} {f.graders_idle:13.0%}  {f.bottleneck}"
    )


def _counts(words: Mapping[str, str], config: RunConfig) -> list[int | None]:
    """Numbers of actors to try; None: the configured number."""
    if "actors" not in words:
        return [None]
    parts = words["actors"].split(",")
    if not all(p.isdigit() and int(p) for p in parts):
        raise UserError(f"actors={words['actors']} is not a list of numbers: write actors=1,2,4.")
    if len(config.actor) > 1:
        raise UserError(
            f"actors={words['actors']} needs one kind of actor, and actor="
            f"[{','.join(config.actor)}] has several: give actor.<label>.count of each instead."
        )
    return [int(p) for p in parts]


def _fleet(config: RunConfig, words: Mapping[str, str], count: int | None) -> PlannedFleet:
    by_label, rates = _rates(config, words)
    actors = {label: count or actor.count for label, actor in config.actor.items()}
    return planned(config, actors, by_label, rates)


def planned(
    config: RunConfig,
    actors: Mapping[str, int],
    by_label: Mapping[str, ActorRates],
    rates: Rates,
    *,
    steps: int = STEPS,
) -> PlannedFleet:
    """The run with these actors at these rates, of at least `steps` optimizer steps and those
    during which it fills and drains."""
    environment = next(iter(config.played.values()), EnvironmentSpec())
    if environment.played:  # which grades its episodes itself
        rates = rates.model_copy(update={"grade_s": UNGRADED_S})
    around = 2 * config.schedule.max_staleness
    # whole phases and publications, at least six of them
    period = max(config.schedule.publish_period, config.schedule.phases.steps)
    schedule = config.schedule.model_copy(
        update={
            "steps": period * max(6, -(-(steps + around) // period)),
            "wait_data_timeout_s": 1e9,
            "step_timeout_s": 1e9,
            "publish_timeout_s": 1e9,
        }
    )
    return PlannedFleet(
        actors,
        by_label,
        rates,
        schedule,
        samples=config.rollout.samples_per_prompt,
        max_tokens=config.rollout.max_new_tokens,
        ref_pass=config.schedule.phases.steps > 1,
        supervision=derived.plan(config).supervision,
        selection=config.algorithm,
        joined=config.cluster.transport in GROUP_TRANSPORTS,
        run_seed=config.seed,
        nodes=_nodes(config, actors),
        max_turns=environment.max_turns,
        max_len=config.model.max_len,
        places=environment.concurrency,
        teachers=held.spec.count if (held := held_engine(config)) else 0,
    )


def _nodes(config: RunConfig, actors: Mapping[str, int]) -> int:
    """Nodes that hold these actors, by the given GPUs of a node."""
    each = config.cluster.launch.gpus_per_node
    if not each:
        return 1
    gpus = {label: a.tensor_parallel * (a.num_gpus or 1) for label, a in config.actor.items()}
    return math.ceil(sum(count * gpus[label] for label, count in actors.items()) / each)


def _rates(config: RunConfig, words: Mapping[str, str]) -> tuple[dict[str, ActorRates], Rates]:
    if "rates" in words:
        rates = _read_rates(words["rates"])
        _check_episodes(config, rates, words)
        refuse(
            rates.beside != beside_of(config),
            f"rates={words['rates']} is of a run with {rates.beside or 'no critic and no teacher'}"
            f", and this one has {beside_of(config) or 'none'}: measure a run that has the same.",
        )
        return dict.fromkeys(config.actor, rates.actor), rates
    gpu = words["gpu"]
    if gpu not in GPUS:
        raise UserError.choice("gpu", gpu, GPUS)
    shape, lengths = shape_of(config, words), lengths_of(config, words)
    ranks = derived.ranks(config)
    learner = learner_rates(GPUS[gpu], shape, ranks, work_beside(config, shape.parameters))
    rates = Rates(
        lengths=lengths,
        learner=learner,
        episodes=episodes_of(config, words),
        teacher_tokens_per_s=_scores_per_s(config, GPUS[gpu]),
    )
    context = rates.context
    for label, actor in config.actor.items():
        refuse(
            actor.own_model,
            f"actor.{label}.kind=draft samples with its own model, which gpu={gpu} cannot "
            "know the rates of: measure them and give rates=FILE.",
        )
    try:
        engines = {
            label: actor_rates(GPUS[gpu], shape, engine_of(actor, context), context=context)
            for label, actor in config.actor.items()
        }
    except ValueError as e:
        raise UserError(f"gpu={gpu} is too small for an engine of this run: {e}.") from e
    return engines, rates


def beside_of(config: RunConfig) -> str:
    """The parts whose time in the ranks is part of measured rates. Example: "critic=model
    teacher=frozen" """
    used = (part.setting(config) for part in PARTS if part.in_rates)
    return " ".join(setting.replace(".kind=", "=") for setting in used if setting)


def work_beside(config: RunConfig, parameters: float) -> Work:
    """FLOPs of all parts in the learner's ranks. `parameters`: of the policy."""
    work = NO_WORK
    for part in PARTS:
        work = work.plus(part.work(config, parameters))
    return work


def held_engine(config: RunConfig) -> HeldEngine | None:
    """The engines that score answers before they are graded; None: there are none."""
    return next((own for part in PARTS for own in part.engines(config)), None)


def _scores_per_s(config: RunConfig, gpu: Gpu) -> float | None:
    """Tokens a second that one of these scores; None: there is none."""
    held = held_engine(config)
    if held is None or held.folder is None:
        return None
    shape = Shape.of(read_config(held.folder), folder_parameters(held.folder))
    engine = EngineShape(held.spec.tensor_parallel)
    return actor_rates(gpu, shape, engine, context=config.model.max_len).prefill_tokens_per_s


def engine_of(actor: ActorSpec, context: float) -> EngineShape:
    """The shape of an engine of this kind, with requests of `context` tokens."""
    budget = None
    if actor.sparse is not None:
        pages, size = actor.sparse.blocks, actor.sparse.block_size
        share = context if pages is None else pages * size
        budget = math.ceil(share * (actor.sparse.share or 1.0))
        if actor.sparse.blocks_by_length is not None:
            budget = size * actor.sparse.max_budget(max(1, math.ceil(context / size)))
    return EngineShape(
        gpus=actor.tensor_parallel,
        fp8=actor.kind == "fp8",
        fp8_kv=actor.fp8_kv_cache,
        budget=budget,
        memory_share=actor.gpu_memory_utilization,
        max_running=actor.max_num_seqs,
    )


def _read_rates(path: str) -> Rates:
    try:
        return Rates.model_validate_json(Path(path).read_text())
    except OSError as e:
        raise UserError(f"rates={path} cannot be read: {e.strerror}.") from e
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"rates={path}: {key} is wrong: {first['msg']}.") from e


def shape_of(config: RunConfig, words: Mapping[str, str]) -> Shape:
    """The policy's shape: named, or read from its folder. Raises UserError."""
    name = words.get("shape")
    if name is not None:
        if name not in SHAPES:
            raise UserError.choice("shape", name, SHAPES)
        return SHAPES[name]
    if config.model.path is None:
        raise UserError(
            f"shape= is missing, and the run has no model.path: name one of {', '.join(SHAPES)}."
        )
    return Shape.of(read_config(config.model.path), folder_parameters(config.model.path))


def lengths_of(config: RunConfig, words: Mapping[str, str]) -> LengthSpec:
    """Lengths of prompts and answers from the words. Raises UserError."""
    most = config.rollout.max_new_tokens
    given: dict[str, Any] = {
        "prompt": _number(words, "prompt_tokens", 256.0),
        "median": _number(words, "median_tokens", most / 4),
        "spread": _number(words, "spread", 0.6),
    }
    return LengthSpec(**(given | {"prompt": int(given["prompt"])}))


def episodes_of(config: RunConfig, words: Mapping[str, str]) -> EpisodeSpec | None:
    """Episodes from the words; None without an environment. Raises UserError."""
    given = [word for word in EPISODE_WORDS if word in words]
    if not config.played:
        refuse(
            bool(given),
            f"{given[0] if given else ''}= is of an environment's episodes, and the run has none: "
            "add environment=NAME.",
        )
        return None
    (environment,) = config.played.values()
    turns = _number(words, "turns", environment.max_turns)
    refuse(
        not 1 <= turns <= environment.max_turns,
        f"turns={turns:g} is not accepted: episodes have 1 to environment.max_turns="
        f"{environment.max_turns} turns.",
    )
    default = EpisodeSpec()
    given_tokens = int(_number(words, "given_tokens", default.given))
    return EpisodeSpec(
        turns=turns, given=given_tokens, call_s=_number(words, "call_s", default.call_s)
    )


def _check_episodes(config: RunConfig, rates: Rates, words: Mapping[str, str]) -> None:
    """Raise UserError for rates of turns and a run of answers, or the reverse."""
    path = words["rates"]
    refuse(
        bool(config.played) and rates.episodes is None,
        f"rates={path} has no episodes, whose turns environment= needs: add them, or measure a run "
        "with the environment.",
    )
    refuse(
        not config.played and rates.episodes is not None,
        f"rates={path} has episodes, and the run has no environment: its lengths belong to turns. "
        "Give rates of a run without one, or add environment=NAME.",
    )


def _number(words: Mapping[str, str], key: str, default: float) -> float:
    if key not in words:
        return default
    try:
        value = float(words[key])
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9 or (value == 0 and key != "spread"):
        raise UserError(f"{key}={words[key]} is not a positive number.")
    return value


GRADED = 256  # answers, to time the graders
GRADING_S = 120.0  # deadline for them
GRADERS_START_S = 60.0


def measure(runs: str, out: str) -> int:
    """Write the rates that `rlcore plan rates=FILE` reads.

    `runs`: run directories, with commas between. Raises UserError.
    """
    found = [_read_run(name) for name in runs.split(",")]
    measured_runs = [run for _, run in found]
    config = found[0][0]
    kinds = sorted({beside_of(own) for own, _ in found})
    refuse(
        len(kinds) > 1,
        f"runs={runs} are with different critics and teachers "
        f"({', '.join(kind or 'none' for kind in kinds)}): measure runs that have the same.",
    )
    rates = measured(
        measured_runs,
        grade_s=_grade_seconds(config),
        beside=kinds[0],
        scored=held_engine(config) is not None,
    )
    Path(out).write_text(rates.model_dump_json(indent=1) + "\n")
    for line in _described(measured_runs, rates):
        print(line)
    print(f"written to {out}")
    return 0


def _read_run(name: str) -> tuple[RunConfig, MeasuredRun]:
    folder = Path(name)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"runs={name} is not a run directory: it holds no config.yaml.")
    config = load([f"run_dir={name}", "resume=auto"])
    check_simulated(config)
    refuse(
        len(config.actor) > 1,
        f"runs={name} has actors of several kinds ({', '.join(config.actor)}), whose lengths and "
        "times cannot be told apart: measure a run of each kind.",
    )
    ((label, actor),) = config.actor.items()
    run = MeasuredRun(
        name,
        run_rows(folder),
        label,
        max_running=actor.max_num_seqs,
        max_tokens=config.rollout.max_new_tokens,
        synchronous=derived.plan(config).synchronous,
        ref_pass=config.schedule.phases.steps > 1,
        played=bool(config.played),
    )
    return config, run


def _grade_seconds(config: RunConfig) -> float | None:
    """Seconds between two answers of the task's graders, timed here; None where a model or server
    grades, too, or an environment alone."""
    ((label, task),) = config.tasks.items()
    if task.weighed or config.played:
        return None
    items = make_task(task.name, task.args, label=label)
    item = items.item("train", 0)
    text = items.worked_answer(item) or item.answer
    scorer = Scorer({label: task}, config.grading, on_scored=lambda scored: None)
    try:
        answers = [
            Answer(i, 0, f"measure:{i}", f"{label}/train/0", text, tokens=len(text))
            for i in range(GRADED + 1)
        ]
        scorer.submit(answers[:1])  # the first answer starts the processes and is not timed
        scorer.drain(GRADERS_START_S)
        begun = time.monotonic()
        scorer.submit(answers[1:])
        scorer.drain(GRADING_S)
        return (time.monotonic() - begun) / GRADED
    finally:
        scorer.close()


def _described(runs: list[MeasuredRun], rates: Rates) -> list[str]:
    actor, learner, lengths = rates.actor, rates.learner, rates.lengths
    batches = [float(run.learner_tokens().mean()) for run in runs]
    told = max(batches) >= SPAN * min(batches)
    how = "" if told else " (all of it by tokens: give a second run with another batch size)"
    return [
        f"engine step    {actor.decode_s * 1e3:.3g} ms, {actor.decode_request_s * 1e6:.3g} us a "
        f"request, {actor.decode_context_s * 1e9:.3g} ns a token of context; "
        f"{actor.prefill_tokens_per_s:.4g} prompt tokens/s",
        f"optimizer step {learner.step_s:.3g} s and {learner.token_s * 1e6:.3g} us a token{how}",
        f"publication    {learner.publish_s:.3g} s of the learner, {actor.load_s:.3g} s of actors",
        f"lengths        prompts {lengths.prompt}, answers {lengths.median:.3g} in the median, "
        f"spread {lengths.spread:.3g}",
        *_described_beside(rates),
    ]


def _described_beside(rates: Rates) -> list[str]:
    if (episodes := rates.episodes) is None:
        return [f"grading        {rates.grade_s * 1e3:.3g} ms an answer"]
    return [
        f"episodes       {episodes.turns:.3g} turns, {episodes.given} tokens given after each; "
        f"{episodes.call_s * 1e3:.3g} ms a call of the environment"
    ]
