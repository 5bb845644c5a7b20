"""The checks of a run before a process starts, and the objects that they build: tasks, prompts,
tokenizer, run directory. Errors that can be found early are raised here, in one sentence."""

from __future__ import annotations

import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.buffer.admission import MIB, check_capacity
from rlcore.commands import derived
from rlcore.commands.derived import most_prompt_tokens
from rlcore.commands.model_checks import check_models, longest_record, within_vocabulary
from rlcore.commands.owner import Owner, own
from rlcore.config.names import load_own
from rlcore.config.schema import RunConfig
from rlcore.config.task_checks import mixed, rewards
from rlcore.corrections.pipeline import Pipeline, build
from rlcore.environments import ENVIRONMENTS, environment_maker
from rlcore.errors import Faults, UserError
from rlcore.files import not_here
from rlcore.interfaces import Task
from rlcore.loop.prompts import (
    Difficulty,
    HeldOutRequests,
    Mixture,
    Prompts,
    PromptSource,
    RequestMaker,
    SampleSettings,
    split_and_index,
    task_seed,
)
from rlcore.metrics.logger import own_sink
from rlcore.metrics.sinks import wandb_mode
from rlcore.models.fresh import build_char_tokenizer, check_vocabulary
from rlcore.models.text import encode_prompt, load_tokenizer, padding, split_stops
from rlcore.objectives.specs import make_advantage, make_loss
from rlcore.registry import resolve
from rlcore.rollout.specs import RolloutSpec
from rlcore.rooms import from_room
from rlcore.spec import refuse
from rlcore.tasks import make_task, remarks_of, tasks_with_tokens
from rlcore.tasks.rewards.specs import LeanSpec, RewardSpec
from rlcore.tasks.specs import EvalTaskSpec
from rlcore.types import Message


def note(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(text, flush=True)


def check_rewards(config: RunConfig) -> None:
    """Raise UserError for a key that the environment does not have, a folder without a model, or a
    class of a user's own that cannot be built. It is built once, and closed.

    No address is asked: a service may come up later than the run.
    """
    faults = Faults()
    for key, reward in rewards(config):
        faults.of(_check_reward, key, reward)
    faults.end()


def _check_reward(key: str, reward: RewardSpec) -> None:
    if reward.endpoint is not None:
        from rlcore.tasks.rewards.requests import api_key

        api_key(key, reward.endpoint)
    if reward.own is not None:
        from rlcore.tasks.rewards.weighted import own_reward

        own_reward(key, reward.own).close()
    if reward.classifier is not None:
        folder = Path(reward.classifier.path)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{key}.path={folder} holds no config.json: give a local Hugging Face folder "
                f"of a sequence classifier; {not_here(str(folder), 'model')}."
            )


def ask_lean_servers(config: RunConfig) -> None:
    """Raise UserError if a Lean server of a run does not answer.

    Unlike other services it must already run: it takes minutes to load its library, and without it
    no sample has a reward.
    """
    for key, reward in rewards(config):
        if reward.lean is not None:
            _ask(key, reward.lean)


def _ask(key: str, spec: LeanSpec) -> None:
    from rlcore.tasks.rewards.requests import api_key

    secret = api_key(key, spec)
    request = urllib.request.Request(f"{spec.url.rstrip('/')}/health")
    if secret:
        request.add_header("Authorization", f"Bearer {secret}")
    try:
        with urllib.request.urlopen(request, timeout=spec.start_timeout_s):
            return
    except urllib.error.HTTPError as error:
        why = f"answers status {error.code}"
        if error.code in (401, 403):
            why += f" (its key is read from {key}.api_key_env={spec.api_key_env})"
    except (OSError, ValueError) as error:  # refused, unknown host, no answer in time, no HTTP
        why = f"does not answer: {error}"
    raise UserError(
        f"{key}.url={spec.url} {why.replace(secret, '***') if secret else why}; start a Lean "
        "server there (project-numina/kimina-lean-server) or name another."
    )


_NO_HELDOUT = "has no held-out problems to evaluate on: name a file of them"
ALL = 1 << 20  # more rows than are ever checked before a run


@dataclass(frozen=True, slots=True)
class Prepared:
    """The inputs of the composition root besides the configuration."""

    config: RunConfig  # as the model can take it
    prompts: Prompts
    requests: RequestMaker
    heldout: HeldOutRequests
    tokenizer: Any
    alphabet: str | None  # characters of the training tasks; None: natural text
    # lines on problems that are left out or changed, and on roles that go by others
    remarks: tuple[str, ...] = ()

    @property
    def pad_id(self) -> int:
        """The token id in the unused positions of a micro-batch."""
        return padding(self.tokenizer)

    def reference(self, prompt_id: str) -> str:
        """The answer that a problem's own grader compares with; "": none."""
        split, index = split_and_index(prompt_id)
        label = prompt_id.partition("/")[0]
        source = self.heldout.sources.get(label) if split == "heldout" else None
        return (source or self.prompts.source(prompt_id)).task.item(split, index).answer


@dataclass(frozen=True, slots=True)
class Walk:
    """The settings by which a task's prompts are walked."""

    spec: EvalTaskSpec
    run_seed: int
    difficulty: Difficulty | None = None


def prepare(config: RunConfig, *, trains: bool = True, evaluates: bool = True) -> Prepared:
    """Build tasks, tokenizer and prompt sources, and check that they fit the model.

    `trains`, `evaluates`: whether these splits of the tasks are read and must hold problems that
    fit. Raises UserError with all faults.
    """
    faults = Faults()
    # First: what it imports may be what the later checks need.
    faults.of(load_own, config)
    faults.of(_build_own, config)
    if evaluates:  # a command that neither trains by rewards nor evaluates has no graders
        faults.of(check_rewards, config)
    tasks = faults.of(make_tasks, config)
    # A model of a folder does not need the tasks.
    tokenizer: Any = None
    vocabulary = 0
    if tasks is not None or config.model.path is not None:
        tokenizer = faults.of(tokenizer_of, config, tasks or {})
        if tokenizer is not None:
            vocabulary = faults.of(check_models, config, tokenizer) or 0
    train: dict[str, PromptSource] = {}
    heldout: dict[str, PromptSource] = {}
    if tasks is not None:  # without a tokenizer, no prompt's length is checked
        train = faults.of(training_sources, config, tasks, tokenizer) or {}
        heldout = faults.of(_heldout, config, train, tokenizer, (trains, evaluates)) or {}
        _check_labels(config, train, tokenizer, faults, (trains, vocabulary > 0))
    # Corrections may change what actors sample from (DVP), so requests are made after them.
    pipeline = faults.of(
        build, config.correction.chosen(), config.seed, config.algorithm, config.strata
    )
    if pipeline is not None:
        faults.of(_check_shadows, config, pipeline)
    faults.end()
    assert tasks is not None and pipeline is not None
    config = within_vocabulary(config, vocabulary, note)
    return _prepared(config, (train, heldout), tokenizer, pipeline)


def _check_labels(
    config: RunConfig,
    train: Mapping[str, PromptSource],
    tokenizer: Any,
    faults: Faults,
    known: tuple[bool, bool],
) -> None:
    """Check every training task by itself. `known`: whether it is trained on, and whether the model
    is right, on which the size of its records depends."""
    trains, fits = known
    for label, source in train.items():
        if tokenizer is not None:
            faults.of(split_stops, tokenizer, config.rollout_of(label).stop)
            if label in config.played:
                faults.of(_check_environment, config, label, source.task, tokenizer)
        if trains:
            faults.of(_check_train, config, label, source)
        if trains and fits:
            faults.of(_check_buffer, config, label)


def _prepared(
    config: RunConfig,
    sources: tuple[dict[str, PromptSource], dict[str, PromptSource]],
    tokenizer: Any,
    pipeline: Pipeline,
) -> Prepared:
    """`sources`: for training, and of held-out prompts."""
    train, heldout = sources
    prompts = _prompts(config, train)
    asked = {label: _asked(config.rollout_of(label), pipeline) for label in config.tasks}
    usual, seed = _asked(config.rollout, pipeline), config.seed
    return Prepared(
        config,
        prompts,
        RequestMaker(
            prompts,
            sampling=usual.sampling,
            samples=usual.samples,
            run_seed=seed,
            tasks=asked,
        ),
        HeldOutRequests(heldout, sampling=usual.sampling, run_seed=seed, tasks=asked),
        tokenizer,
        _alphabet({label: source.task for label, source in train.items()}),
        tuple(_remarks(config, {**train, **heldout}, tokenizer)),
    )


def _remarks(
    config: RunConfig, sources: Mapping[str, PromptSource], tokenizer: Any
) -> Iterator[str]:
    for label, source in sources.items():
        yield from (f"{label}: {line}" for line in remarks_of(source.task))
        yield from (f"{label}: {line}" for line in source.remarks())
    for label in config.played:
        yield from (f"{label}: {line}" for line in from_room("lost_roles")(tokenizer, config.model))
        yield from (f"{label}: {line}" for line in _room(config, label))
    yield from filter(None, (derived.mixed_answers(config), derived.near_floors(config)))


def _room(config: RunConfig, label: str) -> list[str]:
    """A line where a conversation does not hold all turns of an episode."""
    environment, rollout = config.environment_of(label), config.rollout_of(label)
    if environment.max_turns * rollout.max_new_tokens < config.model.max_len:
        return []
    return [
        f"model.max_len={config.model.max_len} does not hold environment.max_turns="
        f"{environment.max_turns} turns of rollout.max_new_tokens={rollout.max_new_tokens}, with "
        "what they are given: a long episode ends there. A first message that lists tools often "
        "takes some hundred tokens; rlcore try shows how many"
    ]


def _build_own(config: RunConfig) -> None:
    """Build the losses and advantages, which may be a user's own and which runs build later. Sinks
    write files when they are built: only their classes are checked, and that W&B is installed if it
    is wanted. Raises UserError."""
    faults = Faults()
    faults.of(make_loss, config.algorithm)
    for label in config.tasks:
        key, name = config.advantage_of(label)
        algorithm = config.algorithm.model_copy(update={"advantage": name})
        faults.of(make_advantage, algorithm, key)
    for name in config.logging.sinks:
        sink = faults.of(own_sink, name)
        if (required := getattr(sink, "_require", None)) is not None:  # a user's own may lack it
            faults.of(required)
    faults.of(wandb_mode, config.logging)
    faults.end()


def _check_environment(config: RunConfig, label: str, task: Task, tokenizer: Any) -> None:
    """Raise UserError for a class or arguments that no episode can be played with."""
    environment = config.environment_of(label)
    cls = resolve(ENVIRONMENTS, str(environment.name), key=config.environment_key(label))
    refuse(
        getattr(cls, "asks_task", False) and bool(tasks_with_tokens({label: config.tasks[label]})),
        f"{config.environment_key(label)}.name={environment.name} gives the task's grader texts "
        f"alone, and the grader of {config.task_key(label)}.name={config.tasks[label].name} asks "
        "for the text of every token: use your own environment that grades its episodes, or "
        f"{config.environment_key(label)}=none for answers of one turn.",
    )
    try:
        made = environment_maker(environment, task)()
        tools = bool(getattr(made, "offers_tools", False))
        from_room("check_template")(environment, tokenizer, config.model, tools=tools)
    except UserError as error:
        # An environment knows the section `environment` alone, not that of a label.
        key = config.environment_key(label)
        raise UserError(str(error).replace("environment.", f"{key}.")) from error


def _check_shadows(config: RunConfig, pipeline: Pipeline) -> None:
    """Raise UserError for a list of correction.shadow that needs more than the run computes."""
    shadow, algorithm = config.correction.shadows, config.algorithm
    if not shadow.lists:
        return
    from rlcore.corrections.shadow import build_shadows, refuse_further_needs

    shadows = build_shadows(shadow, config.seed, algorithm, config.strata)
    several = derived.plan(config).phases.steps > 1 and algorithm.ratio_to == "p_ref"
    refuse_further_needs(pipeline, shadows, scores_once=several)


def _asked(rollout: RolloutSpec, pipeline: Pipeline) -> SampleSettings:
    return SampleSettings(
        pipeline.constrain_sampling(rollout.sampling()), rollout.samples_per_prompt
    )


def make_tasks(config: RunConfig) -> dict[str, Task]:
    """The tasks that are trained on, by label. Raises UserError."""
    faults = Faults()
    made = {
        label: faults.of(make_task, s.name, dict(s.args), label=label, key=config.task_key(label))
        for label, s in config.tasks.items()
    }
    faults.end()
    return {label: task for label, task in made.items() if task is not None}


def training_sources(
    config: RunConfig, tasks: Mapping[str, Task], tokenizer: Any
) -> dict[str, PromptSource]:
    """Prompts of the tasks that are trained on, by label."""
    faults = Faults()
    made = {
        label: faults.of(_training_source, config, label, task, tokenizer)
        for label, task in tasks.items()
    }
    faults.end()
    return {label: source for label, source in made.items() if source is not None}


def _training_source(config: RunConfig, label: str, task: Task, tokenizer: Any) -> PromptSource:
    spec, key = config.tasks[label], config.task_key(label)
    _check_deadline(key, task, key, spec.grade_timeout_s)
    seed = task_seed(config.seed, label) if config.mixed else config.seed
    own = spec.difficulty
    refuse(
        own is not None and own.problems is None and task.size("train") is None,
        f"{key}.difficulty remembers problems, and {key}.name={spec.name} makes new ones "
        f"without end: set {key}.difficulty.problems=N to walk its first N again and again.",
    )
    walk = Walk(spec, seed, Difficulty(own, seed) if own else None)
    return _source(config, label, task, tokenizer, walk)


def _prompts(config: RunConfig, sources: Mapping[str, PromptSource]) -> Prompts:
    if not config.mixed:
        return next(iter(sources.values()))
    weights = {label: spec.weight for label, spec in mixed(config).items()}
    return Mixture(sources, weights, run_seed=config.seed)


def open_run_dir(config: RunConfig, command: str) -> Owner:
    """Create the run directory, or accept an existing one to resume, and become its owner.

    Raises UserError for one that holds a run that is not resumed, that another command writes to,
    or that cannot be written.
    """
    run_dir = Path(config.run_dir)
    refuse_another_run(config)
    owner = own(run_dir, command, takeover_after_s=config.takeover_after_s)
    try:
        (run_dir / "checkpoints").mkdir(exist_ok=True)
    except OSError as e:
        owner.release()
        raise UserError(f"run_dir={run_dir} cannot be written: {e.strerror}.") from e
    return owner


def check_writable(key: str, value: str) -> None:
    """Refuse a folder that cannot be made or written to, by a folder in the nearest that exists,
    which is removed at once. Permissions alone do not tell of root, of a full or read-only disk."""
    folder = Path(value)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".rlcore-", dir=existing):
            return
    except OSError as error:
        raise UserError(
            f"{key}={folder} cannot be written: {existing} is not a folder that this user may "
            f"write to ({error.strerror}); choose another."
        ) from error


def refuse_another_run(config: RunConfig) -> None:
    """Raise UserError if the run directory holds a run that is not resumed."""
    refuse(
        config.resume == "never" and (Path(config.run_dir) / "metrics.jsonl").exists(),
        f"run_dir={config.run_dir} already holds a run: choose another folder, or resume=auto to "
        "continue it.",
    )


def _alphabet(tasks: Mapping[str, Task]) -> str | None:
    """The characters of all tasks; None where one of them is natural text."""
    found = [task.alphabet() for task in tasks.values()]
    if len(found) == 1 or any(alphabet is None for alphabet in found):
        return None if any(alphabet is None for alphabet in found) else found[0]
    return "".join(sorted({c for alphabet in found for c in alphabet or ""}))


def tokenizer_of(config: RunConfig, tasks: Mapping[str, Task]) -> Any:
    """The model folder's tokenizer, or the one that a fresh model will have."""
    if config.model.path is not None:
        return load_tokenizer(config.model.path)
    for label, task in tasks.items():
        if task.alphabet() is None:
            raise UserError(
                f"model.path=null cannot be combined with {config.task_key(label)}.name="
                f"{config.tasks[label].name}: a fresh model's tokenizer is built from the task's "
                "alphabet and this task is natural text; set model.path to a local Hugging Face "
                "folder."
            )
    masked = config.model.diffusion is not None
    tokenizer = build_char_tokenizer(_alphabet(tasks) or "", masked=masked)
    if config.model.fresh is not None:
        check_vocabulary(config.model.fresh, len(tokenizer))
    return tokenizer


def _source(
    config: RunConfig,
    label: str,
    task: Task,
    tokenizer: Any,
    walk: Walk,
) -> PromptSource:
    def encode(asked: str | Sequence[Message]) -> list[int]:
        return encode_prompt(tokenizer, asked, config.model)

    # An environment asks the questions itself, where the episode is played.
    encodes = label not in config.played and tokenizer is not None
    return PromptSource(
        task,
        encode if encodes else None,
        run_seed=walk.run_seed,
        max_prompt_tokens=most_prompt_tokens(config, label, walk.spec),
        difficulty=walk.difficulty,
        overlong=walk.spec.overlong_rows,
        bos=getattr(tokenizer, "bos_token_id", None),
    )


def _heldout(
    config: RunConfig,
    train: Mapping[str, PromptSource],
    tokenizer: Any,
    used: tuple[bool, bool],
) -> dict[str, PromptSource]:
    """Prompts of all tasks that may be evaluated, by label, training tasks first. `used`: whether
    training and held-out rows are read."""
    faults, sources = Faults(), dict(train)
    trains, evaluates = used
    for label in config.evaluation.tasks:
        if (source := faults.of(_evaluation_source, config, label, tokenizer)) is not None:
            sources[label] = source
    if evaluates:
        faults.of(_check_heldout, config, sources, trains)
    faults.end()
    return {n: s for n, s in sources.items() if not evaluates or s.task.size("heldout") != 0}


def _evaluation_source(config: RunConfig, label: str, tokenizer: Any) -> PromptSource:
    spec, key = config.evaluation.tasks[label], f"evaluation.tasks.{label}"
    task = make_task(spec.name, dict(spec.args), label=label, key=key)
    graded_as = config.task_key(next(iter(config.tasks)))
    _check_deadline(key, task, graded_as, config.grading.grade_timeout_s)
    return _source(config, label, task, tokenizer, Walk(spec, config.seed))


def _check_deadline(key: str, task: Task, graded_as: str, limit: float) -> None:
    """Check that a task stops the programs it judges within the deadline of grading: an endless
    program would look like a hung grader. `graded_as`: the key of that deadline's task."""
    own = getattr(task, "timeout_s", None)
    if own is not None and own >= limit:
        raise UserError(
            f"{key}.args.timeout_s={own:g} is not below {graded_as}.grade_timeout_s={limit:g}: "
            "every endless program would be a failed score instead of a wrong answer; lower the "
            "first or raise the second."
        )


def _check_train(config: RunConfig, label: str, prompts: PromptSource) -> None:
    key = config.task_key(label)
    refuse(
        prompts.task.size("train") == 0,
        f"{key}.name={config.tasks[label].name} has no problems to train on: name a file of them "
        f"with {key}.args.train_path.",
    )
    refuse(
        config.tasks[label].overlong_rows == "skip" and prompts.task.size("train") is None,
        f"{key}.overlong_rows=skip leaves rows of a file out, and {key}.name="
        f"{config.tasks[label].name} makes problems without end: use refuse or truncate_left.",
    )
    prompts.check("train", ALL)


def _check_buffer(config: RunConfig, label: str) -> None:
    """Refuse a cluster.buffer_mib that the groups of one update phase would exceed, were all of
    them of this task."""
    check_capacity(
        config.cluster.buffer_mib * MIB,
        config.schedule,
        samples_per_group=config.rollout_of(label).samples_per_prompt,
        longest=longest_record(config, label),
    )


def _check_heldout(config: RunConfig, sources: Mapping[str, PromptSource], trains: bool) -> None:
    """Require held-out problems of every source, except where a run trains without evaluations."""
    spec, faults = config.evaluation, Faults()
    # The evaluation at the end is then left out as well.
    optional = trains and spec.every == 0 and not spec.at_start
    for label, prompts in sources.items():
        if prompts.task.size("heldout") != 0:
            faults.of(prompts.check, "heldout", spec.of(label).prompts)
        elif label not in config.tasks:
            key = f"evaluation.tasks.{label}"
            name = f"{key}.name={spec.tasks[label].name}"
            faults.add(UserError(f"{name} {_NO_HELDOUT} with {key}.args.heldout_path."))
        elif not optional:
            key = config.task_key(label)
            without = ", or train without: evaluation.every=0 evaluation.at_start=false"
            faults.add(
                UserError(
                    f"{key}.name={config.tasks[label].name} {_NO_HELDOUT} with "
                    f"{key}.args.heldout_path{without if trains else ''}."
                )
            )
    faults.end()
