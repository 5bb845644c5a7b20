"""Proofs of one family of models: learner, engines and exports against plain transformers, and the
sentences by which rlcore refuses what it does not compute right."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.models.model_families import Family, write_folder
from rlcore.commands.start_checks import check
from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.learner.rank import LearnerRank
from rlcore.learner.specs import LearnerJob, LearnerSpec, RankPlace
from rlcore.objectives.specs import ObjectiveSpec
from rlcore.reasons import reason
from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine
from rlcore.testing.records import make_group, make_sampling, make_trajectory
from rlcore.types import POLICY, Group, Request, Trajectory
from rlcore.weights.manifest import tensor_checksum
from rlcore.weights.stream import whole

TOLERANCE = 2e-4  # nats, of log-probs in float32 that are computed in two ways
COSINE = 1e-4  # of two gradients, from 1
LENGTH = 96
MODEL = "MODEL"  # stands for the folder in sentences
EQUAL = "equal"
REFUSED = "refused"
LAYOUTS = {"learner, sorted rows": "sorted", "learner, packed rows": "packed"}
EXPORT, ENGINE, MODULES = "export", "engine", "engine, vLLM's modules"
PUBLISHED = "published.safetensors"  # what was published of an export, beside it
COLUMNS = (*LAYOUTS, EXPORT, ENGINE, MODULES)


@dataclass
class Row:
    """The proofs of one family: by column "equal" or the sentence of a refusal, and what was
    measured."""

    family: str
    cells: dict[str, str] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)  # largest differences in nats
    notes: dict[str, str] = field(default_factory=dict)

    def require(self, column: str, what: str, difference: float, most: float = TOLERANCE) -> None:
        """Note a difference. Raises WrongError if it is not rounding."""
        self.measured[f"{column}: {what}"] = float(f"{difference:.2g}")
        if not difference <= most:
            raise WrongError(f"{self.family}, {column}: {what} differ by {difference:.3g}")


class WrongError(Exception):
    """A cell is neither equal nor refused."""


def prove(family: Family, folder: Path, *, engines: bool = True) -> Row:
    """Every cell of a family; `engines=False` leaves those of engines out. Writes beneath
    `folder`. Raises WrongError for the first that is wrong."""
    start, export = folder / "start", folder / "export"
    row = _apart(prove_learner, family, start, export)
    if engines and export.is_dir() and ENGINE not in row.cells:
        row = _apart(_run_engines, row, start, export)
    if engines and (folder / _WRITTEN).exists():
        row = _apart(_compare_engines, row, start, export)
    refusals = [cell for cell in row.cells.values() if cell != EQUAL]
    for column in COLUMNS if engines else (*LAYOUTS, EXPORT):
        if column not in row.cells:
            row.cells[column] = refusals[0]
    return row


DEADLINE_S = 900


def _apart(part: Callable[..., Row], *args: Any) -> Row:
    """A part's row, from a process of its own: the groups of a learner's ranks and those of an
    engine cannot be in one. Raises WrongError with what it raised."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        try:
            theirs.send(part(*args))
        except WrongError as e:
            theirs.send(str(e))
        except Exception:
            theirs.send(traceback.format_exc())

    process = context.Process(target=run)
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(DEADLINE_S) else f"no result in {DEADLINE_S} s"
    except EOFError:
        process.join()
        found = f"its process ended with {process.exitcode}"
    process.kill()
    process.join()
    if isinstance(found, Row):
        return found
    raise WrongError(found)


def run_refusal(model: Path) -> str | None:
    """The sentence by which a run of this model is refused before anything starts, or None."""
    words = [
        "experiment=quickstart",
        "model=path",
        f"model.path={model}",
        f"model.max_len={LENGTH}",
        "run_dir=/tmp/rlcore-models-dry-run",
    ]
    return _refusal(model, lambda: check(load(words)))


def _refusal(model: Path, do: Callable[[], object]) -> str | None:
    try:
        do()
    except UserError as e:
        return f"{REFUSED}: {str(e).replace(str(model), MODEL)}"
    return None


# ---- the learner and its export ------------------------------------------------------------------


def prove_learner(family: Family, start: Path, export: Path) -> Row:
    """The cells of the learner, and of the folder `export` that it writes after a step in sorted
    rows; that of engines where a run is refused before anything starts."""
    row = Row(family.name)
    write_folder(family, start)
    if (refusal := run_refusal(start)) is not None:
        row.cells[ENGINE] = row.cells[MODULES] = refusal
        if refusal.startswith(f"{REFUSED}: model.max_len"):  # which the learner does not know
            row.cells |= dict.fromkeys(COLUMNS, refusal)
            return row
    gradient = export.parent / "gradient"
    for column, layout in LAYOUTS.items():
        try:
            rank = LearnerRank(_job(start, layout), RankPlace(0, 1, "127.0.0.1", 0, 600))
        except UserError as e:
            row.cells[column] = f"{REFUSED}: {str(e).replace(str(start), MODEL)}"
            continue
        compared = _step(row, column, "log-probs", rank, 0, start, str(gradient))
        if export.exists():  # the other layout wrote its gradient
            row.require(column, "gradients", 1 - compared["cosine"], COSINE)
        row.cells[column] = EQUAL
        if not export.exists():
            rank.export(export)
            save_file(dict(rank.published_weights(POLICY, "float32")), export / PUBLISHED)
            _step(row, EXPORT, "log-probs after a step", rank, 1, export)
            row.cells[EXPORT] = EQUAL
    return row


def _job(start: Path, layout: str) -> LearnerJob:
    return LearnerJob(
        model_path=str(start),
        learner=LearnerSpec(lr=1e-2, lr_warmup_steps=0, layout=layout),
        objective=ObjectiveSpec(),
        corrections={},
        sampling=make_sampling(logprobs_k=0),
        total_steps=4,
        run_seed=5,
        pad_id=0,
    )


def _step(
    row: Row,
    column: str,
    what: str,
    rank: LearnerRank,
    step: int,
    model: Path,
    gradient: str | None = None,
) -> Mapping[str, float]:
    """One optimizer step of the learner, whose log-probs before it are those of plain transformers;
    what a comparison of its gradient with that in the folder `gradient` gives."""
    groups = _groups(model)
    rank.begin_phase([groups])
    _, _, compared = rank.traced_step(step, gradient)
    names = [(g.group_id, i) for g in groups for i in range(len(g.episodes))]
    found = rank.sample_details(names)
    ratios = [r for name in names for r in found[name]["log_ratio"]]
    if None in ratios:
        raise WrongError(f"{row.family}, {column}: {what} are not finite")
    row.require(column, what, max(abs(r) for r in ratios))
    return compared


def _groups(model: Path) -> list[Group]:
    """Two groups of answers to one prompt each, with log-probs of plain transformers."""
    reference = Reference(model)
    groups = []
    for g in range(2):
        rng = np.random.default_rng(g)
        prompt = rng.integers(4, 40, 5 + g).tolist()
        made = []
        for i in range(3):
            drawn = rng.integers(4, reference.vocabulary, 9 + 5 * i).tolist()
            one = make_trajectory(g, i, turns=[(prompt, drawn)])
            one.logp_inf = reference.sampled(one)
            made.append(one)
        groups.append(make_group(made, [0.0, 1.0, 0.3 * g]))
    return groups


class Reference:
    """A model folder's log-probs by plain transformers: a sequence a pass, in float32."""

    def __init__(self, folder: Path) -> None:
        self._lm: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.vocabulary = int(self._lm.config.vocab_size)

    @torch.no_grad()
    def sampled(self, t: Trajectory) -> np.ndarray:
        """[S] log-probs of the sampled tokens."""
        logits = self._lm(torch.tensor(t.token_ids[None].astype(np.int64))).logits[0].float()
        at = torch.tensor(np.flatnonzero(t.sampled))
        found = logits.log_softmax(-1)[at - 1, torch.tensor(t.sampled_ids).long()]
        return np.asarray(found.numpy(), np.float32)


# ---- engines -------------------------------------------------------------------------------------


UPDATED = "log-probs around an update in flight"
_WRITTEN = "samples.pickle"


def _run_engines(row: Row, start: Path, export: Path) -> Row:
    """Samples, written beside `export`, of an engine as a run has it, which is updated while it
    samples; and of one of the export, on vLLM's own modules."""
    weights = load_file(export / PUBLISHED)
    (export / PUBLISHED).unlink()
    try:
        engine = start_engine(_engine_job(start))
    except Exception as e:
        # a run ends with this reason before its first step
        said = str(e) if isinstance(e, UserError) else f"the engine does not start: {reason(e)}"
        said = said.replace(str(start), MODEL).rstrip(".")
        row.cells[ENGINE] = row.cells[MODULES] = f"{REFUSED}: {said}."
        return row
    try:
        row.notes[ENGINE] = engine.core.by_modules or "rlcore's decoder"
        samples = {(ENGINE, "log-probs"): _sampled(engine, 0)}
        engine.add(_requests(1))
        done: list[Trajectory] = []
        for _ in range(8):
            done += engine.step()
        engine.update_weights(1, whole(dict(weights)), "in_flight")
        _require_held(row, ENGINE, engine, weights)
        samples[ENGINE, UPDATED] = done + _drain(engine)
    finally:
        engine.close()
    engine = start_engine(replace(_engine_job(export), cpu_fast_paths=False))
    try:
        _require_held(row, MODULES, engine, weights)
        samples[MODULES, "log-probs of the export"] = _sampled(engine, 2)
    finally:
        engine.close()
    (export.parent / _WRITTEN).write_bytes(pickle.dumps(samples))
    return row


def _compare_engines(row: Row, start: Path, export: Path) -> Row:
    """The cells of engines; in another process than theirs, where vLLM changes classes of
    transformers."""
    before, after = Reference(start), Reference(export)
    found = pickle.loads((export.parent / _WRITTEN).read_bytes())
    for (column, what), samples in found.items():
        if len(samples) != 4:
            raise WrongError(f"{row.family}, {column}: {len(samples)} of 4 requests finished")
        apart, versions = [], set()
        for t in samples:
            # an update in flight: earlier tokens are the old model's, later ones the new one's
            old = (t.token_version == 0) & (column == ENGINE)
            expected = np.where(old, before.sampled(t), after.sampled(t))
            apart.append(float(np.abs(t.logp_inf - expected).max()))
            versions |= set(t.token_version.tolist())
        if what == UPDATED and versions != {0, 1}:
            raise WrongError(f"{row.family}: an update in flight met tokens of {versions}")
        row.require(column, what, max(apart))
        row.cells[column] = EQUAL
    return row


def _engine_job(model: Path) -> EngineJob:
    spec = ActorSpec(max_num_seqs=8, kv_cache_gib=0.05, dtype="float32")
    return EngineJob(spec, "bf16-0", str(model), max_len=LENGTH, logprobs_k=4)


def _requests(group: int) -> list[Request]:
    sampling = make_sampling(max_new_tokens=24, logprobs_k=4)
    prompts = [np.array([5 + i, 7, 11, 4, 9, 12][: 3 + i], np.int32) for i in range(4)]
    return [
        Request(group, i, f"t/train/{group}", prompts[i], sampling, seed=group * 10 + i)
        for i in range(4)
    ]


def _sampled(engine: Any, group: int) -> list[Trajectory]:
    engine.add(_requests(group))
    return _drain(engine)


def _drain(engine: Any) -> list[Trajectory]:
    done: list[Trajectory] = []
    for _ in range(500):
        if not engine.unfinished():
            break
        done += engine.step()
    return [*done, *engine.step()]


def _require_held(row: Row, column: str, engine: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """The engine holds exactly what was published, by checksums."""
    held = engine.checksums(engine.names())
    published = {name: tensor_checksum(w) for name, w in weights.items()}
    if held != published:
        odd = sorted(n for n in held.keys() | published if held.get(n) != published.get(n))
        raise WrongError(f"{row.family}, {column}: the engine does not hold {odd[:3]}")
