"""Whole runs that learn, beside each other on one GPU, from one warm-up.

    python benchmarks/gpu/learns.py --work FOLDER        # onpolicy, async, unbound, centre
    python benchmarks/gpu/learns.py --work FOLDER --lr 1e-5 --arms async,fp8,fp8_tis,fp8_centre
    python benchmarks/gpu/learns.py --work FOLDER --arms gsm8k --model SMOLLM2 --rows GSM8K
    python benchmarks/gpu/learns.py --work FOLDER --device cpu          # dry run: tiny, 4 steps

The task is to sort 64 to 128 digits (answers of 65 to 129 tokens), and the reward is the share of
digits in their place. The model, of 157 M parameters, is warmed up by supervised stages until it is
partly right; a folder that holds it is used again. Arms: `onpolicy`; `async`, samples up to
--staleness steps old, with the step bound (`learner.step_bound`); `unbound`, without it; `centre`,
with score centering; `fp8` (weights and keys and values in FP8) without weights, `fp8_tis`,
`fp8_centre`; `draft`, samples of a copy that is trained along; `gsm8k`, a pretrained model on rows
of GSM8K.

Rows go to --out: one a stage of the warm-up, one an arm; rows of steps go beside it, to a file that
ends in .curves.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import runs
from check import Rows
from setting import Row

SIZES = {
    # parameters without embeddings: tiny 0.1 M, m 157 M
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 32},
    "m": {"hidden_size": 1024, "layers": 12, "heads": 8, "kv_heads": 4, "head_dim": 128},
}
LATE, TIS, CENTRE, NONE = "late", "correction=[tis]", "correction=[tis,centre]", "correction=none"
FP8 = ("fp8", LATE)
# an arm's kind of actor, whether its samples are late, and its further words
ARMS: dict[str, tuple[str, ...]] = {
    "onpolicy": ("bf16", "schedule=on_policy", TIS),
    "async": ("bf16", LATE, TIS),
    "unbound": ("bf16", LATE, TIS, "learner.step_bound=null"),
    "centre": ("bf16", LATE, CENTRE),
    "fp8": (*FP8, NONE),
    "fp8_tis": (*FP8, TIS),
    "fp8_centre": (*FP8, CENTRE),
    "draft": ("draft", LATE, TIS, "learner.draft={}"),
    "gsm8k": ("bf16", LATE, TIS),
}
KEPT = (
    *("step", "policy_version", "reward/mean", "entropy", "grad_norm", "loss/policy"),
    *("mismatch/kl_k3", "mismatch/ess", "mismatch/abs_dlogp_mean", "staleness/mean"),
    *("staleness/max", "step_bound/scale", "step_bound/answer_kl", "response_length/mean"),
    *("time/step_s", "time/learn_s", "time/wait_data_s", "time/publish_s"),
    *("throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s"),
)
LOST = 0.2  # reward below which a run has lost its policy
LEAST_S, RESERVE_S = 90.0, 20.0  # of the budget: to start an arm, to write rows


def options(words: list[str] | None = None) -> argparse.Namespace:
    p = runs.parser(__doc__, 570.0)
    p.add_argument("--arms", default=",".join([*ARMS][:4]))
    p.add_argument("--steps", type=int, default=80)
    p.add_argument("--groups", type=int, default=32)
    p.add_argument("--samples", type=int, default=8)
    p.add_argument("--digits", default="64,128", help="fewest and most")
    p.add_argument("--staleness", type=int, default=8)
    p.add_argument("--lr", default="5e-5")
    p.add_argument("--at-once", type=int, default=4, help="arms beside each other")
    p.add_argument("--share", type=float, default=0.10, help="of the GPU's memory, an engine's")
    p.add_argument("--model", type=Path, help="of the arm gsm8k: SmolLM2-135M's folder")
    p.add_argument("--rows", type=Path, help="of the arm gsm8k: folder of train.jsonl, test.jsonl")
    args = p.parse_args(words)
    args.size, args.stages = ("m", 4) if args.device == "cuda" else ("tiny", 1)
    if args.device == "cpu":
        args.groups, args.samples, args.steps, args.digits = 4, 4, 4, "8,16"
        args.staleness, args.at_once = 2, 1
    args.work = args.work.resolve()
    return args


# ---- words


def fresh(size: str) -> str:
    """`model.fresh` of a size; MLPs are three times as wide as the hidden states."""
    shape = SIZES[size] | {"intermediate_size": 3 * SIZES[size]["hidden_size"], "vocab_size": 64}
    return "{" + ", ".join(f"{k}: {v}" for k, v in shape.items()) + "}"


def task(args: argparse.Namespace) -> list[str]:
    low, high = (int(n) for n in args.digits.split(","))
    return [
        *("experiment=quickstart", "task=digits", "task.args.credit=digits", *runs.QUIET),
        *(f"task.args.min_digits={low}", f"task.args.max_digits={high}"),
        *(f"model.max_len={2 * high + 16}", f"rollout.max_new_tokens={high + 2}"),
    ]


def gsm8k(args: argparse.Namespace) -> list[str]:
    files = f"{{train_path: {args.rows}/train.jsonl, heldout_path: {args.rows}/test.jsonl}}"
    return [
        *("experiment=quickstart", "task=gsm8k", f"task.args={files}", *runs.QUIET),
        *("model.max_len=768", "rollout.max_new_tokens=384"),
    ]


def learner(args: argparse.Namespace, share: str) -> list[str]:
    if args.device == "cpu":
        return ["learner.lr_warmup_steps=3"]
    return [
        *("learner=gpu", f"learner.num_gpus={share}", "learner.gradient_checkpointing=false"),
        *("learner.micro_batch_tokens=4096", "learner.lr_warmup_steps=3"),
        "cluster.start_timeout_s=300",
    ]


def share_of(kind: str) -> str:
    """Of the GPU, each process's."""
    return "0.25" if kind == "draft" else "0.5"


def actor(args: argparse.Namespace, kind: str) -> list[str]:
    found = [] if kind == "bf16" else [f"actor={kind}"]
    if kind == "draft":
        found += [f"actor.draft.draft_path={warmed(args)}"]
    if args.device == "cpu":
        return found
    if kind == "fp8":
        found += ["actor.fp8.rounding=none", "actor.fp8.fp8_kv_cache=true"]
    # a draft's weights are its own, and four processes have the GPU
    transport = "object_store" if kind == "draft" else "ipc"
    return [
        *found,
        *(
            f"actor.{kind}.num_gpus={share_of(kind)}",
            f"actor.{kind}.gpu_memory_utilization={args.share}",
        ),
        *(f"actor.{kind}.enforce_eager=true", f"actor.{kind}.max_num_seqs=512"),
        f"cluster.transport={transport}",
    ]


def warmed(args: argparse.Namespace) -> Path:
    """The folder of the warmed-up model."""
    return args.work / f"warm-{args.size}-{args.digits.replace(',', '-')}"


def place(args: argparse.Namespace, name: str) -> Path:
    return args.work / f"arm-{name}-{args.lr}"


def arm(args: argparse.Namespace, name: str) -> list[str]:
    """The words of an arm's run."""
    kind, *further = ARMS[name]
    if LATE in further:
        late = ("schedule=async", f"schedule.max_staleness={args.staleness}")
        further = [*late, *(w for w in further if w != LATE)]
    pretrained = name == "gsm8k"
    model = args.model if pretrained else warmed(args)
    return [
        *("train", *(gsm8k(args) if pretrained else task(args))),
        *(
            "model=path",
            f"model.path={model}",
            *learner(args, share_of(kind)),
            *actor(args, kind),
            *further,
        ),
        *(f"schedule.steps={args.steps}", f"schedule.groups_per_step={args.groups}"),
        *(f"rollout.samples_per_prompt={args.samples}", f"learner.lr={args.lr}"),
        *(f"learner.lr_decay_steps={args.steps}", "learner.lr_final=0.2"),
        *(f"evaluation.every={max(1, args.steps // 5)}", "evaluation.samples=1"),
        f"evaluation.prompts={16 if args.device == 'cpu' else 256}",
        *("checkpoint.keep=1", "checkpoint.at_end=false"),
        *(f"run_dir={place(args, name)}", *args.words),
    ]


def stage(args: argparse.Namespace, at: Path | None, run_dir: Path) -> list[str]:
    """The words of a stage of the warm-up, from `at` or from random weights."""
    model = (
        ["model=path", f"model.path={at}"]
        if at
        else ["model=tiny", f"model.fresh={fresh(args.size)}"]
    )
    steps = 80 if args.device == "cuda" else 6
    warmup = f"{{steps: {steps}, batch_size: 128, lr: 3e-4, lr_warmup_steps: {min(20, steps)}}}"
    return [
        *("sft", *task(args), *model, *learner(args, "1"), f"model.warmup={warmup}"),
        f"run_dir={run_dir}",
    ]


# ---- runs


def warm_up(args: argparse.Namespace, clock: runs.Clock, rows: Rows) -> None:
    """Train until answers are partly right: a loss of 0.35, or four stages. Exits if none ends."""
    target = warmed(args)
    if (target / "config.json").exists():
        return
    at = None
    for n in range(args.stages):
        run_dir = args.work / f"{target.name}-stage{n}"
        shutil.rmtree(run_dir, ignore_errors=True)
        log = run_dir.with_suffix(".log")
        begun = time.monotonic()
        most = 170.0 if args.device == "cuda" else clock.left  # a busy machine starts slowly
        code = runs.run(stage(args, at, run_dir), log, min(most, clock.left - 60))
        losses = re.findall(r"warm-up step \d+/\d+\s+loss ([0-9.]+)", log.read_text())
        seconds = time.monotonic() - begun
        row = {"warm-up": args.size, "stage": n, "exit": code, "losses": " ".join(losses)}
        rows.add({"part": "learns", **row, "seconds": round(seconds, 1)})
        if code or not losses:
            print(runs.tail(log), flush=True)
            if at is None:
                sys.exit("the warm-up failed")
            break
        at = run_dir / "model"
        if float(losses[-1]) <= 0.35:
            break
    shutil.copytree(at or target, target)


@dataclass(slots=True)
class Arms:
    """Arms that wait, run and have ended; each is tried once more if it ends before a step."""

    args: argparse.Namespace
    clock: runs.Clock
    waiting: list[str]
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = field(default_factory=dict)
    ended: dict[str, tuple[int | str, float]] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Start arms one after another, at most --at-once beside each other, until the budget."""
        while (self.waiting or self.running) and self.clock.left > RESERVE_S:
            self._collect()
            ready = all(self._up(name, since) for name, (_, since) in self.running.items())
            if self.waiting and ready and len(self.running) < self.args.at_once:
                if self.clock.left < LEAST_S:
                    break
                self._start(self.waiting.pop(0))
            time.sleep(0.5)
        stopped = [command for command, _ in self.running.values()]
        runs.stop(stopped)
        self.ended |= {n: ("stopped", time.monotonic() - t) for n, (_, t) in self.running.items()}
        self.ended |= {n: ("not started", 0.0) for n in self.waiting}

    def _start(self, name: str) -> None:
        shutil.rmtree(place(self.args, name), ignore_errors=True)
        log = place(self.args, name).with_suffix(".log")
        self.running[name] = runs.start(arm(self.args, name), log), time.monotonic()
        self.clock.say(f"started {name}")

    def _up(self, name: str, since: float) -> bool:
        """Whether engine and learner have started, so that the next arm can measure memory."""
        log = place(self.args, name) / "log.jsonl"
        up = log.exists() and "are up after" in log.read_text(errors="replace")
        return up or time.monotonic() - since > 75

    def _collect(self) -> None:
        for name, (command, since) in [*self.running.items()]:
            code = command.poll()
            if code is None:
                continue
            del self.running[name]
            if code and not runs.steps_of(place(self.args, name)) and name not in self.again:
                print(runs.tail(place(self.args, name).with_suffix(".log")), flush=True)
                self.again.add(name)
                self.waiting.append(name)
            else:
                self.ended[name] = code, time.monotonic() - since
                self.clock.say(f"{name}: exit code {code}")


# ---- rows


def summary(args: argparse.Namespace, name: str, rows: list[Row]) -> Row:
    """An arm's row from the rows of its steps: what it learned, how far samples were from the
    policy, and the seconds of the second half of its steps."""
    rewards = runs.numbers(rows, "reward/mean")
    lost = [r["step"] for r in rows if r.get("reward/mean", 1.0) < LOST]
    ess, scale = runs.numbers(rows, "mismatch/ess"), runs.numbers(rows, "step_bound/scale")
    heldout = [value for row in rows for key, value in sorted(row.items()) if shown(key)]
    late = rows[len(rows) // 2 :]
    means = {
        "k3": "mismatch/kl_k3",
        "staleness": "staleness/mean",
        "answer tokens": "response_length/mean",
        "step s": "time/step_s",
        "learn s": "time/learn_s",
        "wait s": "time/wait_data_s",
        "publish s": "time/publish_s",
        "rollout tokens/s": "throughput/rollout_tokens_per_s",
    }
    return {
        "arm": name,
        "lr": args.lr,
        "steps": len(rows),
        "held-out start": heldout[0] if heldout else None,
        "held-out end": heldout[-1] if heldout else None,
        "reward end": sum(rewards[-5:]) / len(rewards[-5:]) if rewards else None,
        "lost at step": lost[0] if lost else "never",
        "lowest ESS": min(ess, default=None),
        "shortest step": min(scale, default=None),
        **{title: runs.mean(late, key) for title, key in means.items()},
    }


def shown(key: str) -> bool:
    """Whether a column is the mean reward of sampled held-out answers."""
    return key.startswith("eval/") and key.endswith("/sampled_reward")


def compared(found: list[Row], before: list[Row]) -> list[Row]:
    """Rows of arms with how far their held-out reward ends below on-policy's at its own rate, of
    this call or of one `before` it."""
    best = [r["held-out end"] for r in (*before, *found) if r.get("arm") == "onpolicy"]
    for row in found:
        own, top = row["held-out end"], best[-1] if best else None
        row["below on policy"] = None if own is None or top is None else top - own
    return found


def main() -> None:
    args = options()
    clock = runs.Clock(args.budget)
    names = [name for name in args.arms.split(",") if name]
    if unknown := {*names} - {*ARMS}:
        sys.exit(f"--arms has {', '.join(sorted(unknown))}: choose of {', '.join(ARMS)}")
    if "gsm8k" in names and not (args.model and args.rows):
        sys.exit("the arm gsm8k needs --model and --rows")
    rows = runs.opened(args, "learns", args.size)
    if names != ["gsm8k"]:
        warm_up(args, clock, rows)
    clock.say("warm")
    arms = Arms(args, clock, list(names))
    arms.run()
    found = []
    with rows.path.with_suffix(".curves.jsonl").open("a") as curves:
        for name in names:
            steps = runs.steps_of(place(args, name))
            for step in steps:
                kept = {k: v for k, v in step.items() if k in KEPT or k.startswith("eval/")}
                curves.write(json.dumps({"arm": name, "lr": args.lr, **kept}) + "\n")
            code, seconds = arms.ended[name]
            own = summary(args, name, steps)
            found.append({**own, "exit": code, "seconds": round(seconds, 1)})
            if code not in (0, "not started"):
                print(runs.tail(place(args, name).with_suffix(".log")), flush=True)
    before = [json.loads(line) for line in rows.path.read_text().splitlines()]
    for row in compared(found, before):
        rows.add({"part": "learns", **row})
    clock.say(f"rows in {rows.path}")
    if idle := [r["arm"] for r in found if r["exit"] not in (0, "not started") and not r["steps"]]:
        sys.exit(f"no step of {', '.join(idle)}")


if __name__ == "__main__":
    main()
