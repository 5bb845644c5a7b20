"""Supervised warm-up: worked answers of a task, through the same learner ranks and the same head
pass as training."""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.cluster.start import start_learners, wait_started
from rlcore.commands.model_checks import require_end
from rlcore.commands.preflight import Prepared, note, open_run_dir, prepare
from rlcore.commands.processes import connected, environment_jobs, hosting, policy_job
from rlcore.config.compose import to_yaml
from rlcore.config.parts import PARTS
from rlcore.config.schema import RunConfig
from rlcore.config.task_checks import mixed
from rlcore.environments import environment_maker
from rlcore.errors import UserError
from rlcore.files import replace_file
from rlcore.learner.sequences import ScoredSequence, TokenSequence
from rlcore.loop.prompts import Prompts, PromptSource
from rlcore.models.carried import copy_files
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import WarmUpSpec
from rlcore.models.text import encode_text
from rlcore.registry import load_object
from rlcore.rooms import from_room
from rlcore.seeding import derive_seed
from rlcore.spec import refuse
from rlcore.types import POLICY, Item

NOTED_EVERY = 20  # steps
# (config, model_path, end) -> what makes worked answers examples of a masked-diffusion model
MASKED_ANSWERS = "rlcore.extras.diffusion.estimates:MaskedAnswers"
Note = Callable[[str], None]


def starting_model(config: RunConfig, prepared: Prepared, note: Note) -> str:
    """The policy's starting folder: `model.path`, or a warmed-up fresh model, which runs with the
    same settings share."""
    if config.model.path is not None:
        return config.model.path
    found = kept_model(config)
    if found is not None:
        note(f"starting model: {found} (kept from an earlier run)")
        return found
    warmup, kept = config.model.warmup, kept_at(config)
    with _beside(kept) as own:
        made = fresh_model(config, prepared, Path(own) / "fresh")
        if warmup is not None:
            start, made = made, Path(own) / "made"
            train = supervise_exactly if warmup.precision == "float64" else supervise
            train(config, warmup, prepared, start=str(start), out=made, note=note)
        keep(made, kept)
    return str(kept)


def _beside(kept: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the disk that keeps models. Raises UserError if the disk refuses it."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{kept.name}-", dir=kept.parent)
    except OSError as e:
        raise UserError(
            f"model.warmup.cache_dir={kept.parent} cannot be written: {e.strerror}."
        ) from e


def keep(made: Path, kept: Path) -> None:
    """Move a whole model folder to the place where runs look for it. An existing one stays: another
    run with equal settings was first."""
    try:
        made.rename(kept)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def kept_model(config: RunConfig) -> str | None:
    """The fresh model that an earlier run with equal settings has made, if any."""
    kept = kept_at(config)
    return str(kept) if kept.is_dir() else None


def kept_at(config: RunConfig) -> Path:
    """The folder where runs with equal settings keep and find their fresh model."""
    root = Path((config.model.warmup or WarmUpSpec()).cache_dir).absolute()
    return root / f"{'+'.join(config.tasks)}-{_fingerprint(config)}"


def fresh_model(config: RunConfig, prepared: Prepared, folder: Path) -> Path:
    """Write the run's model of random weights."""
    alphabet = prepared.alphabet
    assert config.model.fresh is not None and alphabet is not None
    seed = derive_seed(config.seed, "fresh-model")
    return build_fresh_model(
        folder,
        alphabet,
        config.model.fresh,
        seed=seed,
        max_len=config.model.max_len,
        masked=config.model.diffusion is not None,
    )


def with_drafts(config: RunConfig, prepared: Prepared, note: Note) -> RunConfig:
    """The same run with a folder for every draft that it makes: a fresh model, warmed up as the
    policy is."""
    actors = dict(config.actor)
    for label, actor in config.actor.items():
        if actor.draft_fresh is None:
            continue
        model = config.model.model_copy(update={"fresh": actor.draft_fresh})
        note(f"actor.{label}.draft_fresh: its own draft")
        path = starting_model(config.model_copy(update={"model": model}), prepared, note)
        actors[label] = actor.model_copy(update={"draft_path": path, "draft_fresh": None})
    return config.model_copy(update={"actor": actors})


def supervise(
    config: RunConfig, warmup: WarmUpSpec, prepared: Prepared, *, start: str, out: Path, note: Note
) -> None:
    """Train the model folder `start` on worked answers and write a Hugging Face folder to `out`.

    Raises UserError if the task has no worked answers.
    """
    sft = _supervised(config, warmup)
    shares, hosted = sft.learner.shares, hosting(sft)
    # The same ranks and head pass as in training, so that nothing about the model can differ.
    jobs = {POLICY: policy_job(sft, start, prepared.pad_id)}
    learner = start_learners(hosted, None, jobs, wire_dtype="float32")
    try:
        wait_started(hosted, [learner])
        # A walk of its own: the run's cursor must not depend on whether a model was kept.
        source = prepared.prompts.another_walk(
            run_seed=derive_seed(config.seed, "warm-up"), max_prompt_tokens=config.model.max_len
        )
        another = _examples(config, source, prepared.tokenizer, start)
        began = time.monotonic()
        note(f"warm-up: {warmup.steps} supervised steps of {warmup.batch_size} worked answers")
        for step in range(warmup.steps):
            batch = [another() for _ in range(warmup.batch_size)]
            metrics = learner.sft_step(step, [batch[i::shares] for i in range(shares)])
            if (step + 1) % NOTED_EVERY == 0 or step + 1 == warmup.steps:
                note(
                    f"warm-up step {step + 1}/{warmup.steps}  loss {metrics['loss/sft']:.4f}  "
                    f"{time.monotonic() - began:.0f} s"
                )
        learner.export(str(out))
    finally:
        learner.kill()


def supervise_exactly(
    config: RunConfig, warmup: WarmUpSpec, prepared: Prepared, *, start: str, out: Path, note: Note
) -> None:
    """Train like `supervise`, in float64 in this process; the fresh model's weights are drawn
    anew."""
    from rlcore.learner.protocols import RateSchedule
    from rlcore.models.exact_warmup import ExactWarmUp

    spec = _supervised(config, warmup).learner
    model = ExactWarmUp(
        Path(start),
        seed=derive_seed(config.seed, "fresh-model"),
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
    )
    source = prepared.prompts.another_walk(
        run_seed=derive_seed(config.seed, "warm-up"), max_prompt_tokens=config.model.max_len
    )
    another = _examples(config, source, prepared.tokenizer, start)
    rate = RateSchedule(spec, warmup.steps)
    began = time.monotonic()
    note(f"warm-up: {warmup.steps} steps of {warmup.batch_size} worked answers in float64")
    for step in range(warmup.steps):
        batch = [another() for _ in range(warmup.batch_size)]
        pairs = [(one.token_ids, one.sampled) for one in batch if isinstance(one, TokenSequence)]
        loss = model.step(pairs, rate(step), spec.grad_clip)
        if (step + 1) % NOTED_EVERY == 0 or step + 1 == warmup.steps:
            taken = time.monotonic() - began
            note(f"warm-up step {step + 1}/{warmup.steps}  loss {loss:.4f}  {taken:.0f} s")
    model.save(out)
    copy_files(start, out)


def _examples(
    config: RunConfig, prompts: Prompts, tokenizer: Any, start: str
) -> Callable[[], ScoredSequence]:
    """A function that gives the next worked answer, or the next worked episode. `start`: the folder
    of the model that learns from them."""
    jobs, makers = environment_jobs(config), {}
    end = int(tokenizer.eos_token_id)
    causal = config.model.diffusion is None
    masks = None if causal else load_object(MASKED_ANSWERS)(config, start, end)

    def another() -> ScoredSequence:
        item = prompts.next()
        label = item.prompt_id.partition("/")[0]
        job = jobs.get(label)
        if job is None:
            one = example(
                prompts.source(item.prompt_id), item, tokenizer, config.model.control_tokens
            )
            return one if masks is None else masks(one, label)
        if label not in makers:
            task = prompts.source(item.prompt_id).task
            makers[label] = environment_maker(job.environment, task)
        return TokenSequence(*from_room("worked_episode")(job, makers[label](), item, tokenizer))

    return another


def example(
    source: PromptSource, item: Item, tokenizer: Any, control_tokens: str = "text"
) -> TokenSequence:
    """An item's prompt and worked answer, with end of sequence.

    Raises UserError if it has no worked answer.
    """
    answer = source.task.worked_answer(item)
    if answer is None:
        raise UserError(
            f"task.name={source.task.name} has no worked answers to warm up on: set model.path to "
            "a trained model."
        )
    ids = encode_text(tokenizer, answer, control_tokens)
    return TokenSequence.of_answer(source.encode(item).tolist(), [*ids, tokenizer.eos_token_id])


def _supervised(config: RunConfig, warmup: WarmUpSpec) -> RunConfig:
    """The run's configuration for its warm-up: the whole model, without parts or KL."""
    for part in PARTS:
        config = part.plain(config)
    learner = {
        "lr": warmup.lr,
        "lr_warmup_steps": warmup.lr_warmup_steps,
        "lr_schedule": warmup.lr_schedule,
        "lr_decay_steps": None,
        "lr_final": 0.0,
        "lora": None,
        "max_threads": None,  # a kept model depends on no load
    }
    return config.model_copy(
        update={
            "learner": config.learner.model_copy(update=learner),
            "schedule": config.schedule.model_copy(update={"steps": warmup.steps}),
            "algorithm": config.algorithm.model_copy(update={"kl_coef": 0.0}),
        }
    )


def _played(config: RunConfig) -> dict[str, Any]:
    """Return the settings that worked episodes depend on; none without an environment."""
    found = {label: [e.name, e.args, e.max_turns] for label, e in config.played.items()}
    if config.mixed:
        return {"environments": found} if found else {}
    return {"environment": next(iter(found.values()))} if found else {}


def _denoised(config: RunConfig) -> dict[str, Any]:
    """Return the settings that masked answers depend on; none for a causal model."""
    if config.model.diffusion is None:
        return {}
    canvas = {label: config.rollout_of(label).max_new_tokens for label in config.tasks}
    return {"prompt_masking": config.model.diffusion.prompt_masking, "canvas": canvas}


def _fingerprint(config: RunConfig) -> str:
    """A digest of everything that the starting model depends on."""
    model, warmup = config.model, config.model.warmup
    assert model.fresh is not None
    weighted = mixed(config).items()
    tasks: list[Any] = [[label, s.name, s.args, s.weight] for label, s in weighted]
    settings = {
        "model": model.fresh.model_dump(),
        "max_len": model.max_len,
        "warmup": _warmed(warmup) if warmup else None,
        "task": tasks or [part for s in config.tasks.values() for part in (s.name, s.args)],
        **_played(config),
        **_denoised(config),
        "seed": config.seed,
        "format": 1,  # raised when equal settings begin to mean another model
    }
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _warmed(warmup: WarmUpSpec) -> dict[str, Any]:
    # models from before precision could be chosen stay usable
    default = {"precision"} if warmup.precision == "float32" else set()
    return warmup.model_dump(exclude={"cache_dir", *default})


def sft(config: RunConfig) -> int:
    """Warm up `model.path` or a fresh model on worked answers; writes `run_dir/model`, a Hugging
    Face folder."""
    prepared = prepare(config, evaluates=False)
    require_end(config, prepared.tokenizer)
    with open_run_dir(config, "rlcore sft") as owner:
        if owner.news:
            note(owner.news)
        _sft(config, prepared, owner.folder)
    return 0


def _sft(config: RunConfig, prepared: Prepared, run_dir: Path) -> None:
    out = run_dir / "model"
    refuse(out.exists(), f"run_dir={run_dir} already holds a model: choose another folder.")
    replace_file(run_dir / "config.yaml", to_yaml(config))
    start = config.model.path or str(fresh_model(config, prepared, run_dir / "fresh"))
    warmup = config.model.warmup or WarmUpSpec()
    with connected(config, actors=False):
        supervise(config, warmup, prepared, start=start, out=out, note=note)
    note(f"model written to {out}")
