"""rlcore beside TRL with a colocated vLLM on one GPU: a random model's shape, lengths and batch.

    python benchmarks/gpu/beside_trl.py --work FOLDER                    # TRL's search, then ORDER
    python benchmarks/gpu/beside_trl.py --work FOLDER --order async,trl  # goes on in FOLDER
    python benchmarks/gpu/beside_trl.py --work FOLDER --shape 1.7b --order trl,async
    python benchmarks/gpu/beside_trl.py --work FOLDER --device cpu       # dry run: tiny

Runs take turns in the given order while the budget lasts: `trl`, `async` (engine and learner at
once, each on half of the GPU) and `turns` (all of it for both in turn); rlcore's with +liger,
+compiled, +k0 (the sampled token's log-prob alone), +sparse (block top-k attention, prompts by
blocks; for long ones) or +eager (engines without graphs). TRL's
micro-batch is searched once, by trials of three steps. Learning rates are so small that the model
stays the same, so that all sample answers of the same lengths.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
from pathlib import Path

import runs
from check import Rows
from random_model import FIRST, SHAPES
from setting import Row

HERE = Path(__file__).resolve().parent
ORDER = "trl,async,async+liger,async+compiled,turns,trl"
SKIP = {"async": 4, "turns": 2, "trl": 2}  # steps until caches are warm and the pipeline is full
GRADER = "def coin(item, response):\n    return float(len(response) % 2)\n"
LIMIT_S = {"trl": 400.0, "async": 330.0, "turns": 330.0}
LAYERS = ("liger", "compiled")
FURTHER = (*LAYERS, "k0", "sparse", "eager")
SPARSE = "{block_size: 16, blocks: 64, prompt: block}"
TRIALS = (
    {"rows": 16, "liger": False},
    {"rows": 16, "liger": True},
    {"rows": 32, "liger": True},
)
SECONDS = {
    "learn s": "time/learn_s",
    "wait s": "time/wait_data_s",
    "publish s": "time/publish_s",
    "release s": "time/learner_release_s",
    "update s": "time/learner_update_s",
    "positions": "train/positions",
    "rollout tokens/s": "throughput/rollout_tokens_per_s",
    "staleness": "staleness/mean",
    "ESS": "mismatch/ess",
}


def options(words: list[str] | None = None) -> argparse.Namespace:
    p = runs.parser(__doc__, 560.0)
    p.add_argument("--order", default=ORDER)
    p.add_argument("--shape", default="0.6b", choices=SHAPES)
    p.add_argument("--groups", type=int, default=32)
    p.add_argument("--samples", type=int, default=8)
    p.add_argument("--prompt", type=int, default=256, help="tokens")
    p.add_argument("--max-tokens", type=int, default=512)
    p.add_argument("--mean", type=float, default=192.0, help="a token ends an answer once in these")
    p.add_argument("--counted", type=int, default=8, help="steps that count")
    p.add_argument("--share", type=float, default=0.3, help="of the GPU's memory, an engine's")
    p.add_argument("--micro", type=int, default=8192, help="rlcore's micro-batch, in tokens")
    args = p.parse_args(words)
    if args.device == "cpu":
        args.shape, args.groups, args.samples, args.prompt = "tiny", 4, 4, 12
        args.max_tokens, args.mean, args.counted = 24, 8.0, 2
    args.work = args.work.resolve()
    args.max_len = args.prompt + args.max_tokens + 16
    return args


def model(args: argparse.Namespace) -> Path:
    return Path(args.work / f"model-{args.shape}")


def prompts(args: argparse.Namespace) -> list[str]:
    """Texts of random words, more than all steps of a run take."""
    rng, last = random.Random(0), SHAPES[args.shape]["vocab_size"]
    count = args.groups * (args.counted + 8)
    words = [f"w{rng.randrange(FIRST, last)}" for _ in range(count * args.prompt)]
    return [" ".join(words[i * args.prompt :][: args.prompt]) for i in range(count)]


def prepare(args: argparse.Namespace) -> None:
    """Write the model, the prompts and their grader. Exits if the model cannot be written."""
    args.work.mkdir(parents=True, exist_ok=True)
    rows = ({"question": p, "answer": "0"} for p in prompts(args))
    (args.work / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (args.work / "coin.py").write_text(GRADER)
    if (model(args) / "config.json").exists():
        return
    log, program = args.work / "model.log", (str(HERE / "random_model.py"),)
    code = runs.run([str(model(args)), args.shape, str(args.mean)], log, 150.0, program)
    print(runs.tail(log), flush=True)
    if code:
        sys.exit("the model could not be written")


# ---- rlcore


def words(args: argparse.Namespace, who: str, run_dir: Path) -> list[str]:
    """The words of a run: `async` or `turns`, with what follows a plus."""
    kind, *further = who.split("+")
    if unknown := {*further} - {*FURTHER}:
        sys.exit(f"--order has +{', +'.join(unknown)}: choose of +{', +'.join(FURTHER)}")
    file, grader = args.work / "prompts.jsonl", f"{args.work / 'coin.py'}:coin"
    return [
        *("train", "experiment=quickstart", "model=path", f"model.path={model(args)}"),
        *(f"model.max_len={args.max_len}", "task=file", *runs.QUIET, "logging=quiet"),
        f"task.args={{train_path: {file}, grader: '{grader}'}}",
        *("evaluation.every=0", "evaluation.at_start=false", "checkpoint.at_end=false"),
        f"schedule.steps={SKIP[kind] + args.counted + 1}",
        *(f"schedule.groups_per_step={args.groups}", f"rollout.samples_per_prompt={args.samples}"),
        *(f"rollout.max_new_tokens={args.max_tokens}", "correction=[tis]", "algorithm=grpo"),
        *(["rollout.logprobs_k=0"] if "k0" in further else []),
        *(["actor=sparse", f"actor.sparse.sparse={SPARSE}"] if "sparse" in further else []),
        *(on_cpu(kind) if args.device == "cpu" else on_gpu(args, kind, further)),
        *("learner.lr=1e-8", "learner.lr_schedule=constant", f"run_dir={run_dir}", *args.words),
    ]


def schedule(kind: str) -> list[str]:
    if kind == "async":
        return ["schedule=async", "schedule.max_staleness=1"]
    return ["schedule=on_policy", "schedule.colocated=true"]


def on_cpu(kind: str) -> list[str]:
    return [*schedule(kind), *([] if kind == "async" else ["cluster.transport=object_store"])]


def on_gpu(args: argparse.Namespace, kind: str, further: list[str]) -> list[str]:
    actor = "actor.sparse" if "sparse" in further else "actor.bf16"
    layers = next((name for name in further if name in LAYERS), "torch")
    share, memory, micro = (
        ("0.5", args.share, args.micro) if kind == "async" else ("1", 0.5, 2 * args.micro)
    )
    return [
        *("learner=gpu", "learner.gradient_checkpointing=false", f"learner.layers={layers}"),
        *(f"learner.micro_batch_tokens={micro}", f"learner.num_gpus={share}"),
        *("cluster.transport=ipc", "cluster.start_timeout_s=400"),
        *(f"{actor}.num_gpus={share}", f"{actor}.gpu_memory_utilization={memory}"),
        f"{actor}.max_num_seqs={args.groups * args.samples}",
        f"{actor}.enforce_eager={'true' if 'eager' in further else 'false'}",
        *schedule(kind),
        *([] if kind == "async" else ["learner.offload_while_sampling=false"]),
    ]


def rlcore(args: argparse.Namespace, who: str, index: int, limit_s: float) -> Row:
    """Run rlcore; the row of its steps that count."""
    place = args.work / f"{args.shape}-{who}-{index}"
    shutil.rmtree(place, ignore_errors=True)
    log = args.work / f"{place.name}.log"
    code = runs.run(words(args, who, place), log, limit_s)
    counted = runs.steps_of(place)[SKIP[who.split("+")[0]] :]
    # the last step of a whole run has what ends it
    counted = (counted[:-1] if code == 0 else counted)[-args.counted :]
    if not counted:
        print(runs.tail(log), flush=True)
        return {"exit": code, "counted": 0}
    return {
        "exit": code,
        "counted": len(counted),
        "step s": runs.mean(counted, "time/step_s"),
        "tokens": runs.mean(counted, "train/tokens"),
        **{title: runs.mean(counted, key) for title, key in SECONDS.items()},
    }


# ---- TRL


def job(args: argparse.Namespace, best: Row | None) -> Row:
    """What `trl_side.py` is asked for; `best`: the trial that was the fastest, if it is known."""
    return {
        "model": str(model(args)),
        "prompts": prompts(args),
        "groups": args.groups,
        "samples": args.samples,
        "max_tokens": args.max_tokens,
        "max_len": args.max_len,
        "share": args.share,
        "best": best,
        "trials": []
        if best
        else [{**t, "liger": t["liger"] and args.device == "cuda"} for t in TRIALS],
        "trial_steps": 3,
        "steps": SKIP["trl"] + args.counted,
    }


def trl(args: argparse.Namespace, index: int, limit_s: float, best: Row | None) -> Row:
    """Run TRL; the row of its steps that count, with the trial that it used."""
    place = args.work / f"{args.shape}-trl-{index}"
    asked, out = place.with_suffix(".job.json"), place.with_suffix(".out.json")
    log = place.with_suffix(".log")
    asked.write_text(json.dumps(job(args, best)))
    out.unlink(missing_ok=True)
    code = runs.run([str(asked), str(out)], log, limit_s, (str(HERE / "trl_side.py"),))
    found = json.loads(out.read_text()) if out.exists() else {}
    row: Row = {
        "exit": code,
        "counted": 0,
        "best": found.get("best"),
        "trials": found.get("trials"),
    }
    if "measured" not in found:
        print(runs.tail(log), flush=True)
        return row

    def mean(key: str) -> float:
        return statistics.fmean(found["measured"][key][-args.counted :])

    return row | {
        "counted": args.counted,
        "step s": mean("step_s"),
        "tokens": mean("tokens"),
        "generate s": mean("generate_s"),
        "publish s": mean("push_s"),
        "peak GiB": found["measured"]["peak_gib"],
        "version": found["version"],
    }


# ---- rows


def rates(found: list[Row], shape: str) -> list[Row]:
    """Median tokens a second of each that ran, and how many times TRL's that is."""
    mine = [r for r in found if r.get("shape") == shape and r.get("step s")]
    values = {
        who: [r["tokens"] / r["step s"] for r in mine if r["who"] == who]
        for who in dict.fromkeys(r["who"] for r in mine)
    }
    peer = statistics.median(values["trl"]) if "trl" in values else None
    return [
        {
            "part": "peers",
            "shape": shape,
            "of": who,
            "runs": len(speeds),
            "tokens/s": statistics.median(speeds),
            "times TRL": statistics.median(speeds) / peer if peer else None,
        }
        for who, speeds in values.items()
    ]


def main() -> None:
    args = options()
    clock = runs.Clock(args.budget)
    prepare(args)
    rows: Rows = runs.opened(args, "peers", args.shape)

    def known() -> list[Row]:
        lines = [json.loads(line) for line in rows.path.read_text().splitlines()]
        return [r for r in lines if r.get("shape") == args.shape and "who" in r]

    for who in args.order.split(","):
        kind = who.split("+")[0]
        before = [r for r in known() if r["who"] == who]
        if clock.left < 60:
            rows.add({"part": "peers", "what": f"skipped: time, {args.shape} {who}"})
            continue
        clock.say(f"{args.shape} {who}, run {len(before)}")
        limit_s = min(LIMIT_S[kind], clock.left - 8)
        if kind == "trl":
            best = next((r["best"] for r in before if r.get("best")), None)
            found = trl(args, len(before), limit_s, best)
        else:
            found = rlcore(args, who, len(before), limit_s)
        rows.add({"part": "peers", "shape": args.shape, "who": who, "run": len(before), **found})
    for row in rates(known(), args.shape):
        rows.add(row)
    clock.say(f"rows in {rows.path}")


if __name__ == "__main__":
    main()
