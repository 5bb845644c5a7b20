"""Everything that can be refused before a process is started is refused here, in one sentence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.config.schema import EvalTask, RunConfig, SparseConfig
from rlcore.corrections import build
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.models import ATTENTION_FILE, build_char_tokenizer, encode_prompt, load_tokenizer, padding
from rlcore.runtime import options
from rlcore.runtime.model_checks import check_models
from rlcore.runtime.prompts import PromptSource
from rlcore.runtime.requests import RequestMaker
from rlcore.tasks import make_task

_NO_HELDOUT = "has no held-out problems to evaluate on: name a file of them"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the composition root needs besides the configuration."""

    prompts: PromptSource
    requests: RequestMaker
    eval_prompts: dict[str, PromptSource]
    tokenizer: Any

    @property
    def pad_id(self) -> int:
        """What fills the unused places of a micro-batch."""
        return padding(self.tokenizer)


def prepare(config: RunConfig, *, trains: bool = True, evaluates: bool = True) -> Prepared:
    """Build tasks, tokenizer and prompt sources, and check that they fit the model. Raises UserError.

    `trains`, `evaluates`: which splits of the tasks will be read, and must hold problems that fit.
    """
    task = make_task(config.task.name, dict(config.task.args), label=options.task_label(config))
    tokenizer = load_tokenizer(config.model.path) if config.model.path else _made_up_tokenizer(config, task.alphabet())
    check_models(config, tokenizer)

    def source(spec: EvalTask, built: Task) -> PromptSource:
        limit = config.model.max_len - config.rollout.max_new_tokens
        return PromptSource(
            built,
            lambda text: encode_prompt(
                tokenizer, text, chat_template=config.model.chat_template, system_prompt=config.model.system_prompt
            ),
            run_seed=config.seed,
            max_prompt_tokens=min(limit, spec.max_prompt_tokens or limit),
        )

    _check_deadline(config, "task", task)
    train = source(config.task, task)
    if trains:
        _check_train(config, train)
    heldout = {options.task_label(config): train}
    for label, spec in config.evaluation.tasks.items():
        made = make_task(spec.name, dict(spec.args), label=label, key=f"evaluation.tasks.{label}")
        _check_deadline(config, f"evaluation.tasks.{label}", made)
        heldout[label] = source(spec, made)
    if evaluates:
        heldout = _checked_heldout(config, heldout, trains)
    pipeline = build(config.correction.chosen(), run_seed=config.seed)
    sampling = pipeline.constrain_sampling(options.sampling(config))
    pipeline.check(sampling)
    requests = RequestMaker(train, sampling=sampling, samples=config.rollout.samples_per_prompt, run_seed=config.seed)
    return Prepared(train, requests, heldout, tokenizer)


def _check_deadline(config: RunConfig, key: str, task: Task) -> None:
    """A task that stops what it judges must do so within the deadline of grading, else that looks like a hang."""
    own, limit = getattr(task, "timeout_s", None), config.task.grade_timeout_s
    if own is not None and own >= limit:
        raise UserError(
            f"{key}.args.timeout_s={own:g} is not below task.grade_timeout_s={limit:g}: every endless program would be "
            "a failed score instead of a wrong answer; lower the one or raise the other."
        )


def _check_train(config: RunConfig, prompts: PromptSource) -> None:
    if prompts.task.size("train") == 0:
        raise UserError(
            f"task.name={config.task.name} has no problems to train on: name a file of them with task.args.train_path."
        )
    prompts.check("train", 1 << 20)


def _checked_heldout(config: RunConfig, sources: dict[str, PromptSource], trains: bool) -> dict[str, PromptSource]:
    """Those that have held-out problems: all of them, unless it is training without evaluations that was asked for."""
    e, own = config.evaluation, options.task_label(config)
    optional = trains and e.every == 0 and not e.at_start
    found = {}
    for label, prompts in sources.items():
        if prompts.task.size("heldout") != 0:
            prompts.check("heldout", e.prompts)
            found[label] = prompts
        elif label != own:
            key = f"evaluation.tasks.{label}"
            raise UserError(f"{key}.name={e.tasks[label].name} {_NO_HELDOUT} with {key}.args.heldout_path.")
        elif not optional:
            instead = ", or train without: evaluation.every=0 evaluation.at_start=false" if trains else ""
            raise UserError(f"task.name={config.task.name} {_NO_HELDOUT} with task.args.heldout_path{instead}.")
    return found


def check_attention(config: RunConfig) -> None:
    """Raise UserError when model.path was exported for a sparse attention that the evaluating engines do not have."""
    path = config.model.path
    if path is None or not (file := Path(path) / ATTENTION_FILE).is_file():
        return
    made_for = SparseConfig(**json.loads(file.read_text())["sparse"])
    plain = options.evaluation_actor(config)
    engines = {"evaluation.dense_actor": plain} if plain else {f"actor.{n}": a for n, a in config.actor.items()}
    for key, engine in engines.items():
        if engine.sparse != made_for:
            keys = ",".join(f"{k}:{json.dumps(v)}" for k, v in made_for.model_dump().items())
            raise UserError(
                f"model.path={path} is made for sparse attention that {key} does not have, and would answer otherwise "
                f"without a word: choose actor=sparse 'actor.sparse.sparse={{{keys}}}'."
            )


def _made_up_tokenizer(config: RunConfig, alphabet: str | None) -> Any:
    if config.model.fresh is None:
        raise UserError("model.path=null: give a local model folder, or model.fresh to make a small model.")
    if alphabet is None:
        raise UserError(
            f"model.path=null cannot go with task.name={config.task.name}: a fresh model's tokenizer is built from the "
            "task's alphabet and this task is natural text; set model.path to a local Hugging Face folder."
        )
    return build_char_tokenizer(alphabet)


def open_run_dir(config: RunConfig) -> Path:
    """Create the run directory, or accept an existing one to resume. Raises UserError for one that holds a run."""
    run_dir = Path(config.run_dir)
    if config.resume == "never" and (run_dir / "metrics.jsonl").exists():
        raise UserError(f"run_dir={run_dir} already holds a run: choose another folder, or resume=auto to continue it.")
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as e:
        raise UserError(f"run_dir={run_dir} cannot be written: {e.strerror}.") from e
    return run_dir
