"""`rlcore train ... dry_run=true`: every check that precedes a start, and a description of the run
that would start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlcore.cluster.specs import joined_address
from rlcore.commands import derived
from rlcore.commands.about import run_kernels
from rlcore.commands.memory import memory_lines, policy_parameters, published_bytes
from rlcore.commands.node_places import check_idle, placed
from rlcore.commands.preflight import Prepared
from rlcore.commands.start_checks import check
from rlcore.commands.warm_up import kept_model
from rlcore.config.compose import check_resume
from rlcore.config.parts import PARTS
from rlcore.config.schema import RunConfig
from rlcore.config.task_checks import mixed, tasks
from rlcore.config.unread import unread
from rlcore.launch.specs import ELSEWHERE
from rlcore.loop import checkpoint
from rlcore.loop.prompts import HeldOutRequests
from rlcore.loop.run_plan import Progress
from rlcore.loop.specs import EvaluationSpec
from rlcore.metrics.rows import read_rows
from rlcore.metrics.sinks import NO_WANDB, wandb_mode
from rlcore.rollout.specs import ActorSpec
from rlcore.rooms import from_room
from rlcore.spec import Spec, refuse
from rlcore.tasks.specs import MixedTaskSpec

MIB = 2**20


def dry_run(config: RunConfig, words: Mapping[str, str] | None = None) -> int:
    """Make all checks that `train` makes before it starts, and print the processes that it would
    start, without starting any.

    `words`: rates for a forecast, as of `rlcore plan`. Joins no cluster and writes nothing. Returns
    0; raises UserError as `train` does.
    """
    config = derived.with_stated_threads(config)
    prepared = check(config)
    start, config = _start(config, prepared), prepared.config
    pace = from_room("expected")(config, words or {})
    print("rlcore train, dry run: every check before the start passed; nothing is started.\n")
    for title, lines in (*_sections(config, prepared, start), ("forecast", pace)):
        for i, line in enumerate(lines):
            print(f"{title if i == 0 else '':13s}{line}")
    return 0


def _start(config: RunConfig, prepared: Prepared) -> str:
    """The point where the run would begin; `config` as it was composed. Raises UserError for a run
    that could not be continued."""
    folder = Path(config.run_dir)
    rows = read_rows(folder / "metrics.jsonl")
    root = folder / "checkpoints"
    if config.resume == "never" or not root.is_dir():
        return "new"
    # Not `resume_from`, which sets damaged checkpoints aside.
    found = checkpoint.newest_valid(root, print)
    if found is None:
        refuse(
            any(root.glob("step_*")),
            f"run_dir={folder} holds checkpoints and none is valid, so resume=auto has nothing to "
            "go on from: restore one of them, or choose another run_dir to begin anew.",
        )
        return "new"
    check_resume(config)
    state = checkpoint.state_of(found)
    prepared.prompts.restore(state["prompts"])
    progress = Progress(**state["progress"])
    derived.plan(config).check_resume(progress)
    step = progress.step
    last = int(rows[-1]["step"] or 0) if rows else step
    refuse(
        last < step,
        f"{folder}/metrics.jsonl ends at step {last} and the run continues from step {step}: put "
        "the missing rows back, or move the file away to start a new one.",
    )
    return f"continues from {found.name}"


def _sections(config: RunConfig, prepared: Prepared, start: str) -> Iterator[tuple[str, list[str]]]:
    """(title, lines) of everything that would be started and written."""
    yield "run", [f"{config.run_dir}, {start}, to step {config.schedule.steps}"]
    yield "model", [_model(config, prepared)]
    yield "tasks", _tasks(config, prepared)
    if config.played:
        yield "episodes", [from_room("conversation_form")(prepared.tokenizer, config.model)]
    yield "actors", _actors(config)
    yield "sampling", [_settings(config.rollout)]
    yield "corrections", list(_corrections(config))
    names = f"advantage={config.algorithm.advantage} loss={config.algorithm.loss}"
    idle = derived.idle_clip(config)
    yield "algorithm", [names, *_changed(config.algorithm), *filter(None, [idle])]
    if unread(config):
        yield "not read", unread(config)
    yield "schedule", [_schedule(config), *_changed(config.schedule)]
    yield "learner", _learner(config)
    yield "resources", _resources(config, prepared)
    yield "memory", memory_lines(config, prepared.tokenizer)
    yield "writes", _writes(config)


def _corrections(config: RunConfig) -> Iterator[str]:
    none = "none: the mismatch is measured and not corrected"
    for key, found in config.correction_lists.items():
        whose = f"{key}, " if key != "correction" else ""
        yield from (f"{whose}{n}: {_settings(s)}" for n, s in found.chosen().items())
        if not found.chosen():
            yield f"{whose}{none}"
    yield from derived.cautions(config)
    shadow = config.correction.shadows
    for label, chosen in shadow.lists.items():
        settings = "; ".join(f"{n}: {_settings(s)}" for n, s in chosen.items())
        yield f"measured beside every {shadow.every} steps, {label}: {settings or none}"


def _settings(spec: Spec) -> str:
    """All settings that have a value, without sections within."""
    return _line(spec.model_dump(mode="json"))


def _changed(spec: Spec) -> list[str]:
    """The settings that differ from their defaults, as one line or none."""
    line = _line(spec.model_dump(mode="json", exclude_defaults=True))
    return [f"changed: {line}"] if line else []


def _line(settings: Mapping[str, object]) -> str:
    plain = {k: v for k, v in settings.items() if v not in (None, []) and not isinstance(v, dict)}
    return " ".join(f"{name}={_value(value)}" for name, value in plain.items())


def _count(number: float, thing: str) -> str:
    return f"{number:g} {thing}{'' if number == 1 else 's'}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def _model(config: RunConfig, prepared: Prepared) -> str:
    size = f"{policy_parameters(config, prepared.tokenizer) / 1e6:,.1f} M parameters"
    path = config.model.path or kept_model(config)
    if path is not None:
        return f"{path}, {size}"
    warmup = config.model.warmup
    if warmup is None:
        return f"fresh, {size}, random weights"
    return (
        f"fresh, {size}, after {warmup.steps} supervised steps of {warmup.batch_size} worked "
        f"answers (kept in {warmup.cache_dir})"
    )


def _tasks(config: RunConfig, prepared: Prepared) -> list[str]:
    spec = config.evaluation
    usual = [label for label in prepared.heldout.sources if spec.of(label) == spec]
    own = [label for label in prepared.heldout.sources if label not in usual]
    when = f"every {spec.every} steps and at the end" if spec.every else "at the end"
    times = f"{'at the start, ' if spec.at_start else ''}{when}"
    return [
        *(_trained(config, label) for label in config.tasks),
        *prepared.remarks,
        *_rewards(config),
        f"evaluated {times} on {_evaluated(prepared.heldout, usual, spec.prompts)}, {_asked(spec)}",
        *(
            f"and on {_evaluated(prepared.heldout, [n], spec.of(n).prompts)}, {_asked(spec.of(n))}"
            for n in own
        ),
        *(f"and on {', '.join(spec.actors)}, each by itself" for _ in spec.actors[:1]),
    ]


def _asked(spec: EvaluationSpec) -> str:
    """The sampling of an evaluation: mean@16 at temperature 0.6, top_p 0.95 and greedy."""
    given = {"top_p": spec.top_p, "top_k": spec.top_k, "max_new_tokens": spec.max_new_tokens}
    cuts = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    how = ", ".join([f"at temperature {spec.temperature:g}", *cuts])
    shown = how if cuts or spec.temperature != 1 else ""
    sampled = " ".join(filter(None, [f"mean@{spec.samples}", shown]))
    return f"{sampled}{' and greedy' if spec.greedy else ''}"


def _evaluated(heldout: HeldOutRequests, labels: Sequence[str], asked: int) -> str:
    """Tasks with the held-out prompts that an evaluation uses of each."""
    counts = {label: heldout.count(label, asked) for label in labels}
    if not counts:
        return "nothing: no task has held-out problems"
    if set(counts.values()) == {asked}:
        return f"{', '.join(counts)}: {asked} prompts{' each' if len(counts) > 1 else ''}"
    fewer = [label for label, count in counts.items() if count < asked]
    used = ", ".join(f"{count} prompts of {label}" for label, count in counts.items())
    return f"{used} (evaluation.prompts={asked}; {', '.join(fewer)}: all there are)"


def _trained(config: RunConfig, label: str) -> str:
    spec = config.tasks[label]
    judged, played = _count(spec.grader_processes, "grader"), config.played.get(label)
    if played is not None:
        judged = f"played in {played.name}, at most {_count(played.max_turns, 'turn')} an episode"
    line = f"training on {spec.name}, {judged}"
    if not isinstance(spec, MixedTaskSpec):
        return line
    total = sum(task.weight for task in mixed(config).values())
    rollout = config.rollout_of(label)
    return (
        f"{label}: {spec.weight / total:.0%} of the prompts, {line}, "
        f"{_count(rollout.samples_per_prompt, 'sample')} of up to {rollout.max_new_tokens} tokens"
    )


def _rewards(config: RunConfig) -> list[str]:
    """The rewards of every task that has others than its own grader's."""
    lines = []
    for key, task in tasks(config).items():
        if task.weighed:
            own = [] if task.grade_weight is None else [f"{task.grade_weight:g} x its own grader"]
            more = [f"{r.weight:g} x {label} ({r.kind})" for label, r in task.rewards.items()]
            lines.append(f"{key}: the reward is {' + '.join([*own, *more])}")
    return lines


def _actors(config: RunConfig) -> list[str]:
    engines: dict[str, tuple[ActorSpec, str]] = {n: (a, "") for n, a in config.actor.items()}
    plain = derived.evaluation_actor(config)
    if plain is not None:
        engines["evaluation"] = (plain, ", for evaluations alone")
    lines = []
    for label, (actor, purpose) in engines.items():
        what = derived.describe_actor(label, actor, config.model.max_len)
        ranks = f" of {actor.tensor_parallel} ranks" if actor.tensor_parallel > 1 else ""
        gpus = actor.num_gpus * actor.tensor_parallel
        each = f"{_count(actor.num_cpus, 'CPU')} and {_count(gpus, 'GPU')} each"
        lines.append(f"{what}{purpose}; {actor.count} x {actor.engine}{ranks}, {each}")
    return lines


def _schedule(config: RunConfig) -> str:
    spec, n = config.schedule, config.rollout.samples_per_prompt
    batches, epochs = spec.phases.batches, spec.epochs
    one_ref = f"one p_ref for {batches} batches x {_count(epochs, 'epoch')}; "
    pace = (
        "generation and learning take turns" + (", on the same GPUs" if spec.colocated else "")
        if spec.synchronous
        else "generation goes on while the learner trains, "
        f"{'exactly' if spec.lag else 'at most'} {_count(spec.max_staleness, 'step')} behind"
    )
    return (
        f"{_count(spec.steps, 'step')} of {_count(spec.groups_per_step, 'prompt')} x "
        f"{_count(n, 'sample')}, weights published every {_count(spec.publish_period, 'step')}; "
        f"{one_ref if spec.phases.steps > 1 else ''}{pace}"
    )


def _learner(config: RunConfig) -> list[str]:
    spec = config.learner
    beside: dict[str, Spec] = {"lora": spec.lora} if spec.lora else {}
    for part in PARTS:
        beside |= part.described(config) if part.setting(config) else {}
    engine = ", ".join(filter(None, [spec.engine, spec.facts.words(spec)]))
    return [
        f"{_count(derived.ranks(config), 'rank')} of {engine}, "
        f"{spec.compute_dtype} on {spec.device}, learning rate {spec.lr:g}",
        *([derived.describe_threads(config)] if spec.device == "cpu" else []),
        *filter(None, [derived.steps_in_flight(config)]),
        *_changed(spec),
        f"tried on the model only as it starts: {', '.join(spec.shortcuts)}",
        *(f"{name}: {_settings(own)}" for name, own in beside.items()),
    ]


def _resources(config: RunConfig, prepared: Prepared) -> list[str]:
    (cpus, gpus), spec = derived.needed(config), config.cluster
    address, kind = joined_address(spec.address), spec.launch.kind
    where = "a cluster of this machine"
    if kind in ELSEWHERE:
        where = f"the nodes of cluster.launch ({kind})"
    elif address:
        where = f"the cluster at {address}, of which a dry run sees nothing"
    size = published_bytes(config, prepared.tokenizer) / MIB
    lines = [
        f"{_count(cpus, 'CPU')} and {_count(gpus, 'GPU')} on {where}",
        f"{size:,.1f} MiB of weights a publication, in {derived.wire_dtype(config)} by "
        f"{spec.transport}",
        f"{spec.buffer_mib} MiB of trajectories in the buffer",
    ]
    if kind in ELSEWHERE:
        nodes = placed(config)
        lines += [*map(str, nodes), *check_idle(config, nodes)]
    elif address is None:
        lines.append(f"{spec.object_store_mib} MiB of shared memory for the object store")
    else:
        lines.append("it is not joined: whether it holds these roles is seen as the run starts")
    if (kernels := run_kernels(config, trial=False)) is not None:
        tried = "chosen by a trial at the start" if kernels.source == "unknown" else str(kernels)
        lines.append(f"matrix kernels: {tried}")
    return lines


def _writes(config: RunConfig) -> list[str]:
    """Files by the setting that has them written."""
    spec, logging = config.checkpoint, config.logging
    wandb = wandb_mode(logging)
    every = {f"every {spec.every_s:g} s": spec.every_s, f"every {spec.every} steps": spec.every}
    when = " and ".join(text for text, on in every.items() if on) or "none while the run goes on"
    files = {
        "config.yaml": "this configuration",
        "about.json": "machine, commit, versions, shortcuts that were compared",
        "metrics.jsonl": "one row a step",
        "details.jsonl": "its further columns" if logging.detail == "full" else "",
        "timeline.jsonl": "who worked and who waited in the last steps",
        "checkpoints/": f"{when}, {'and' if spec.at_end else 'not'} at the end; newest {spec.keep}",
        "samples/": f"of {logging.samples_per_step} groups of each step, of the first one all",
        "report.html": "at the end" if logging.report else "",
        "wandb/": wandb if wandb != "disabled" else NO_WANDB if logging.wandb is None else "",
        "weights/": "publications" if config.cluster.transport == "disk" else "",
    }
    return [f"{config.run_dir}/{name:15s}{what}" for name, what in files.items() if what]
