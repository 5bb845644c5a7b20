"""Everything that can be refused before a process is started is refused here, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.buffer.capacity import check_capacity
from rlcore.commands.model_checks import check_models
from rlcore.config.names import load_own
from rlcore.config.schema import RunConfig
from rlcore.corrections.pipeline import build
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.loop.prompts import HeldOutRequests, PromptSource, RequestMaker
from rlcore.models.fresh import build_char_tokenizer
from rlcore.models.text import encode_prompt, load_tokenizer, padding
from rlcore.spec import refuse
from rlcore.tasks import make_task
from rlcore.tasks.specs import EvalTaskSpec

_NO_HELDOUT = "has no held-out problems to evaluate on: name a file of them"
ALL = 1 << 20  # more rows than are ever checked before a run


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the composition root needs besides the configuration."""

    prompts: PromptSource
    requests: RequestMaker
    heldout: HeldOutRequests
    tokenizer: Any

    @property
    def pad_id(self) -> int:
        """What fills the unused positions of a micro-batch."""
        return padding(self.tokenizer)


def prepare(config: RunConfig, *, trains: bool = True, evaluates: bool = True) -> Prepared:
    """Build tasks, tokenizer and prompt sources, and check that they fit the model.

    `trains`, `evaluates`: which splits of the tasks will be read, and must hold problems that fit.
    Raises UserError.
    """
    # First: what it imports may be what the later checks need.
    load_own(config)
    task = make_task(config.task.name, dict(config.task.args), label=config.task.label)
    tokenizer = _tokenizer(config, task)
    check_models(config, tokenizer)
    _check_deadline(config, "task", task)
    train = _source(config, config.task, task, tokenizer)
    if trains:
        _check_train(config, train)
        _check_buffer(config)
    heldout = {config.task.label: train, **_evaluation_sources(config, tokenizer)}
    if evaluates:
        heldout = _checked_heldout(config, heldout, trains)
    # Corrections may change what actors sample from (DVP), so requests are made after them.
    pipeline = build(config.correction.chosen(), config.seed, config.algorithm)
    sampling = pipeline.constrain_sampling(config.rollout.sampling())
    samples, seed = config.rollout.samples_per_prompt, config.seed
    return Prepared(
        train,
        RequestMaker(train, sampling=sampling, samples=samples, run_seed=seed),
        HeldOutRequests(heldout, sampling=sampling, run_seed=seed),
        tokenizer,
    )


def open_run_dir(config: RunConfig) -> Path:
    """Create the run directory, or accept an existing one to resume.

    Raises UserError for one that holds a run that is not resumed.
    """
    run_dir = Path(config.run_dir)
    refuse_another_run(config)
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        # A folder of a mounted disk may exist and refuse every write.
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as e:
        raise UserError(f"run_dir={run_dir} cannot be written: {e.strerror}.") from e
    return run_dir


def refuse_another_run(config: RunConfig) -> None:
    """Raise UserError if the run directory holds a run that is not resumed."""
    refuse(
        config.resume == "never" and (Path(config.run_dir) / "metrics.jsonl").exists(),
        f"run_dir={config.run_dir} already holds a run: choose another folder, or resume=auto to "
        "continue it.",
    )


def _tokenizer(config: RunConfig, task: Task) -> Any:
    """The model folder's tokenizer, or the one that a fresh model will have."""
    if config.model.path is not None:
        return load_tokenizer(config.model.path)
    alphabet = task.alphabet()
    if alphabet is None:
        raise UserError(
            f"model.path=null cannot go with task.name={config.task.name}: a fresh model's "
            "tokenizer is built from the task's alphabet and this task is natural text; set "
            "model.path to a local Hugging Face folder."
        )
    return build_char_tokenizer(alphabet)


def _source(config: RunConfig, spec: EvalTaskSpec, task: Task, tokenizer: Any) -> PromptSource:
    model = config.model
    # A response must always fit behind its prompt.
    room = model.max_len - config.rollout.max_new_tokens

    def encode(text: str) -> list[int]:
        return encode_prompt(
            tokenizer, text, chat_template=model.chat_template, system_prompt=model.system_prompt
        )

    longest = min(room, spec.max_prompt_tokens or room)
    return PromptSource(task, encode, run_seed=config.seed, max_prompt_tokens=longest)


def _evaluation_sources(config: RunConfig, tokenizer: Any) -> dict[str, PromptSource]:
    """Prompts of the tasks that are only evaluated, by label."""
    sources = {}
    for label, spec in config.evaluation.tasks.items():
        key = f"evaluation.tasks.{label}"
        task = make_task(spec.name, dict(spec.args), label=label, key=key)
        _check_deadline(config, key, task)
        sources[label] = _source(config, spec, task, tokenizer)
    return sources


def _check_deadline(config: RunConfig, key: str, task: Task) -> None:
    """A task that stops the programs it judges must do so within the deadline of grading, or an
    endless program looks like a hung grader."""
    own, limit = getattr(task, "timeout_s", None), config.task.grade_timeout_s
    if own is not None and own >= limit:
        raise UserError(
            f"{key}.args.timeout_s={own:g} is not below task.grade_timeout_s={limit:g}: every "
            "endless program would be a failed score instead of a wrong answer; lower the first or "
            "raise the second."
        )


def _check_train(config: RunConfig, prompts: PromptSource) -> None:
    refuse(
        prompts.task.size("train") == 0,
        f"task.name={config.task.name} has no problems to train on: name a file of them with "
        "task.args.train_path.",
    )
    prompts.check("train", ALL)


def _check_buffer(config: RunConfig) -> None:
    """Refuse a cluster.buffer_mib that the groups of one update phase would exceed."""
    check_capacity(
        config.cluster.buffer_mib << 20,
        config.schedule,
        samples_per_group=config.rollout.samples_per_prompt,
        max_len=config.model.max_len,
        max_new_tokens=config.rollout.max_new_tokens,
        logprobs_k=config.rollout.logprobs_k,
    )


def _checked_heldout(
    config: RunConfig, sources: Mapping[str, PromptSource], trains: bool
) -> dict[str, PromptSource]:
    """The sources that have held-out problems. All must, except where a run trains without
    evaluations."""
    spec, own = config.evaluation, config.task.label
    # The evaluation at the end is then left out as well.
    optional = trains and spec.every == 0 and not spec.at_start
    found = {}
    for label, prompts in sources.items():
        if prompts.task.size("heldout") != 0:
            prompts.check("heldout", spec.prompts)
            found[label] = prompts
        elif label != own:
            key = f"evaluation.tasks.{label}"
            raise UserError(
                f"{key}.name={spec.tasks[label].name} {_NO_HELDOUT} with {key}.args.heldout_path."
            )
        elif not optional:
            without = ", or train without: evaluation.every=0 evaluation.at_start=false"
            raise UserError(
                f"task.name={config.task.name} {_NO_HELDOUT} with task.args.heldout_path"
                f"{without if trains else ''}."
            )
    return found
