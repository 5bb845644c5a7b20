"""Seconds a step of rlcore and of its peers, side by side.

    python benchmarks/peers.py --rounds 3 --folder DIR [--out FILE.md] [--page docs/figures.md]

Every peer (`peer_adapters.py`) and rlcore's two schedules take turns within a round, with the same
model, kind of prompts, limits of length, optimizer, precision and environment variables. Results go
to DIR/runs.jsonl as they come; a run that is there is not repeated. Figures count on a machine that
does nothing else; the page says how busy it was.

The learning rate is so small that the model stays the same, so that all sample answers of the same
lengths in all steps. Engine and learner alone are those of the on-policy run, in which either waits
for the other: the time from a step's prompts to its scored batch, and the learner's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from harness import machine, table
from peer_adapters import PEERS, REFUSALS, Peer, Rlcore

from rlcore.commands.warm_up import kept_model
from rlcore.config.compose import load as compose
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec
from rlcore.tasks import make_task

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
ASYNC, ON_POLICY = "rlcore", "rlcore, on policy"
SKIPPED = {ASYNC: 3, ON_POLICY: 2}  # steps until caches are warm and the pipeline is full
PEER_SKIPPED = 1
QUIET = 0.3  # cores that others keep busy before a run, above which its figure does not count


@dataclass(frozen=True, slots=True)
class Load:
    """What a step consists of, and how many steps are run."""

    name: str
    groups: int
    max_tokens: int
    max_len: int  # positions of the model
    rows: int  # sequences of a peer's micro-batch: chosen by hand, not by a search
    steps: Mapping[str, int]  # by who runs
    samples: int = 8
    lr: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.95)
    threads: int = 2
    seed: int = 0


LOADS = (
    Load("short and even", 64, 16, 128, 128, {ASYNC: 13, ON_POLICY: 10, "peer": 7}),
    Load("long-tailed", 16, 384, 512, 32, {ASYNC: 10, ON_POLICY: 6, "peer": 3}),
)
QUICK = {ASYNC: SKIPPED[ASYNC] + 3, ON_POLICY: SKIPPED[ON_POLICY] + 3, "peer": PEER_SKIPPED + 2}
Found = dict[str, Any]  # a line of runs.jsonl


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--environments", type=Path, default=Path("cache/peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--loads", nargs="+", default=["short", "long-tailed"])
    parser.add_argument("--quick", action="store_true", help="two steps that count, to try it out")
    parser.add_argument("--out", type=Path, help="a page for the table")
    parser.add_argument("--page", type=Path, help=f"a page that has {BEGIN}")
    parser.add_argument("words", nargs="*", help="further overrides of rlcore")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    peers = [PEERS[name](args.environments.resolve()) for name in args.peers]
    for peer in peers:
        peer.prepare()
    loads = [load for load in LOADS if load.name.split()[0] in args.loads]
    if args.quick:
        loads = [replace(load, steps=QUICK) for load in loads]
    jobs = {load.name: job_of(load, folder, args.words) for load in loads}
    runs = Runs(folder / "runs.jsonl")
    for round_ in range(args.rounds):
        for load in loads:
            measure(runs, round_, load, jobs[load.name], peers, folder)
    found = runs.of(jobs)
    text = page(found, [p.name for p in peers])
    print(f"\n{text}")
    if args.out:
        args.out.write_text(text)
    if args.page and max(f["busy"] for f in found) > QUIET:
        print(f"{args.page} stays as it was: the machine was busy")
    elif args.page:
        put(args.page, short_table(found, [p.name for p in peers]))


def job_of(load: Load, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Everything that a run of this load depends on."""
    task = make_task("digits", {}, label="digits")
    items = [task.item("train", i) for i in range(load.groups * max(load.steps.values()))]
    problems = [{"prompt": item.question, "answer": item.answer} for item in items]
    model = short_model(folder) if load.name == "short and even" else long_model(folder)
    described = {k: v for k, v in asdict(load).items() if k != "name"}
    return {**described, "load": load.name, "model": model, "problems": problems, "words": words}


def short_model(folder: Path) -> str:
    """The quickstart's, warmed up: its answers are short and end by themselves."""
    config = compose(["experiment=quickstart", "run_dir=unused"])
    if kept_model(config) is None:
        print("warming up the quickstart's model: a minute", flush=True)
        Rlcore().warm_up(folder / "warm-up")
    path = kept_model(config)
    assert path is not None
    return path


def long_model(folder: Path) -> str:
    """Random weights and 132 tokens: each next token ends the answer with a chance of 1 in 132 or
    so, which makes 125 tokens in the mean where 384 are allowed."""
    path = folder / "long-model"
    if not path.exists():
        spec = FreshModelSpec(vocab_size=132)
        build_fresh_model(path, "0123456789=", spec, seed=1, max_len=512)
    return str(path)


class Runs:
    """The file of what was measured."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found: list[Found] = [json.loads(line) for line in lines]

    def have(self, key: Found) -> bool:
        """Whether this run is there."""
        return any(key.items() <= found.items() for found in self._found)

    def add(self, found: Found) -> None:
        """Keep it."""
        self._found.append(found)
        with self._path.open("a") as file:
            file.write(json.dumps(found) + "\n")

    def of(self, jobs: Mapping[str, Any]) -> list[Found]:
        """Runs of these jobs."""
        return [f for f in self._found if f["load"] in jobs and f["job"] == digest(jobs[f["load"]])]


def digest(job: Mapping[str, Any]) -> str:
    """By which a job is known again; `problems` follow from the rest."""
    return json.dumps({k: v for k, v in job.items() if k != "problems"}, sort_keys=True)


def measure(
    runs: Runs,
    round_: int,
    load: Load,
    job: dict[str, Any],
    peers: Sequence[Peer],
    folder: Path,
) -> None:
    """One round on one load; every second one in the other order."""
    own = Rlcore()
    turns: list[tuple[str, Callable[[Path], Found]]] = [
        (ASYNC, lambda at: own.run(job, load.steps[ASYNC], at)),
        (ON_POLICY, lambda at: own.run(job, load.steps[ON_POLICY], at, on_policy=True)),
    ]
    for peer in peers:
        turns.append((peer.name, lambda at, peer=peer: peer.run(job, load.steps["peer"], at)))
    for who, run in turns if round_ % 2 else reversed(turns):
        key = {"round": round_, "load": load.name, "who": who, "job": digest(job)}
        if runs.have(key):
            continue
        place = folder / f"{load.name}-{who}-{round_}".replace(" ", "_").replace(",", "")
        busy = psutil.cpu_percent(interval=2.0) / 100 * (os.cpu_count() or 1)
        skipped = SKIPPED.get(who, PEER_SKIPPED)
        steps = {name: v[skipped:] for name, v in run(place).items() if isinstance(v, list)}
        means = {name: statistics.mean(values) for name, values in steps.items()}
        runs.add({**key, **means, "busy": busy})
        print(f"round {round_}, {load.name}, {who}: {means['step_s']:.2f} s a step", flush=True)


def page(found: Sequence[Found], peers: Sequence[str]) -> str:
    """The whole result, with what was measured how."""
    rounds = 1 + max(f["round"] for f in found)
    busiest = max(f["busy"] for f in found)
    valid = "" if busiest <= QUIET else " **The machine was busy: these figures do not count.**"
    rows = " and ".join(str(load.rows) for load in LOADS)
    refusals = "\n".join(f"- {name}: {words}" for name, words in REFUSALS.items())
    return (
        "# rlcore beside its peers\n\n"
        f"`python benchmarks/peers.py --rounds {rounds}` on {machine()}; medians of {rounds}"
        " rounds, in brackets the smallest and the largest. Before each run other processes kept at"
        f" most {busiest:.1f} cores busy.{valid}\n\n{short_table(found, peers)}\n\n"
        "The limit is the larger of engine and learner alone, each with the core that it has in the"
        " run.\n\n"
        f"{table([details(found, load, peers) for load in loads_of(found)])}\n\n"
        "Prompts are of the same task, not the same ones. rlcore stores 20 top log-probs of every"
        f" token, peers only the sampled one's. A peer's micro-batches have {rows} sequences, which"
        " no search has chosen.\n\n"
        f"Peers that were not measured:\n\n{refusals}\n"
    )


def short_table(found: Sequence[Found], peers: Sequence[str]) -> str:
    """The table of docs/figures.md."""
    rows = []
    for load in loads_of(found):
        own = by_round(found, load, ASYNC)
        for peer in peers:
            theirs = by_round(found, load, peer)
            both = sorted(own.keys() & theirs.keys())
            ratios = [theirs[r] / own[r] for r in both]
            row = {"load": described(load), f"{peer}, s a step": spread(theirs.values())}
            rows.append(row | {"rlcore, s a step": spread(own.values()), "times": spread(ratios)})
    return table(rows)


def details(found: Sequence[Found], load: str, peers: Sequence[str]) -> dict[str, str]:
    """rlcore's own parts on a load, and the tokens that everybody sampled."""
    own, turned = by_round(found, load, ASYNC), by_round(found, load, ON_POLICY)
    engine = by_round(found, load, ON_POLICY, "wait_s")
    learner = by_round(found, load, ON_POLICY, "learn_s")
    limit = {r: max(engine[r], learner[r]) for r in engine}
    both = sorted(own.keys() & turned.keys())
    sampled = {who: by_round(found, load, who, "tokens").values() for who in (ASYNC, *peers)}
    return {
        "load": load,
        "asynchronous, s a step": spread(own.values()),
        "on policy": spread(turned.values()),
        "times faster": spread([turned[r] / own[r] for r in both]),
        "engine alone": spread(engine.values()),
        "learner alone": spread(learner.values()),
        "limit": spread(limit.values()),
        "limit / asynchronous": spread([limit[r] / own[r] for r in both]),
        "tokens a step": "; ".join(
            f"{w} {statistics.mean(t):.0f}" for w, t in sampled.items() if t
        ),
    }


def loads_of(found: Sequence[Found]) -> list[str]:
    return [load.name for load in LOADS if any(f["load"] == load.name for f in found)]


def described(name: str) -> str:
    """A load by its sizes."""
    load = next(load for load in LOADS if load.name == name)
    return f"{name}: {load.groups * load.samples} sequences of at most {load.max_tokens} tokens"


def by_round(found: Iterable[Found], load: str, who: str, what: str = "step_s") -> dict[int, float]:
    """A figure of a party on a load, by round."""
    return {f["round"]: f[what] for f in found if (f["load"], f["who"]) == (load, who)}


def spread(values: Iterable[float]) -> str:
    """Example: 1.52 (1.50 to 1.61)."""
    known = sorted(values)
    if not known:
        return ""
    middle = f"{statistics.median(known):.2f}"
    return middle if len(known) == 1 else f"{middle} ({known[0]:.2f} to {known[-1]:.2f})"


def put(path: Path, text: str) -> None:
    """Replace what is between the marks of a page. Raises ValueError where it has none."""
    head, mark, rest = path.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{path} has no {BEGIN} and {END}")
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")


if __name__ == "__main__":
    main()
