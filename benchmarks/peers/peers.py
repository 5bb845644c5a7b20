"""Seconds a step of rlcore and of its peers, side by side.

    python -m benchmarks.peers.peers --rounds 3 --folder DIR [--loads short adapter ...]
        [--results FILE]

Every peer (`peer_adapters.py`) and rlcore's two schedules take turns within a round, with the same
model, kind of prompts, limits of length, optimizer, precision and environment variables, on a load
of `peer_loads.py`. Before that each peer's best micro-batch is searched: of 8 to 512 sequences, by
a run of two steps each, while it does not take longer and `--search-s` lasts. Runs go to
DIR/runs.jsonl as they come; a run that is there is not repeated.

Figures count on a machine that does nothing else. With `--results FILE.jsonl` those that count
replace the lines of the same machine and load there, and FILE.md is made of all lines, a table for
each machine.

The learning rate is so small that the model stays the same, so that all sample answers of the same
lengths in all steps. Engine and learner alone are those of the on-policy run, in which either waits
for the other: the time from a step's prompts to its scored batch, and the learner's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import machine, table
from benchmarks.peers.peer_adapters import PEERS, REFUSALS, Peer, Rlcore
from benchmarks.peers.peer_loads import ASYNC, LOADS, ON_POLICY, Load, job_of

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
SKIPPED = {ASYNC: 3, ON_POLICY: 2}  # steps until caches are warm and the pipeline is full
PEER_SKIPPED = 1
QUIET = 0.3  # cores that others keep busy before a run, above which its figure does not count


ROWS = (8, 16, 32, 64, 128, 256, 512)  # sequences of a peer's micro-batch that are tried
WORSE = 2  # in a row, after which larger ones are not tried
KEYS = [load.key for load in LOADS]
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
    parser.add_argument("--loads", nargs="+", default=["short", "long-tailed"], choices=KEYS)
    parser.add_argument("--search-s", type=float, default=600.0, help="for a peer and load")
    parser.add_argument("--quick", action="store_true", help="two steps that count, to try it out")
    parser.add_argument("--results", type=Path, help="FILE.jsonl of all machines")
    parser.add_argument("--page", type=Path, help=f"a page that has {BEGIN}")
    parser.add_argument("words", nargs="*", help="further overrides of rlcore")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    peers = [PEERS[name](args.environments.resolve()) for name in args.peers]
    for peer in peers:
        peer.prepare()
    loads = [load for load in LOADS if load.key in args.loads]
    if args.quick:
        loads = [replace(load, steps=QUICK) for load in loads]
    jobs = {load.name: job_of(load, folder, args.words) for load in loads}
    runs = Runs(folder / "runs.jsonl")
    for load in loads:
        for peer in peers:
            search(runs, load, jobs[load.name], peer, folder, args.search_s)
    for round_ in range(args.rounds):
        for load in loads:
            measure(runs, round_, load, jobs[load.name], peers, folder)
    found = runs.of(jobs)
    print(f"\n{page(found, args.peers)}")
    if max(f["busy"] for f in found) > QUIET:
        print("nothing is kept: the machine was busy")
        return
    if args.results:
        found = merged(read_lines(args.results), found)
        args.results.write_text("".join(json.dumps(line) + "\n" for line in found))
        args.results.with_suffix(".md").write_text(page(found, args.peers))
    if args.page:
        put(args.page, short_table(found, args.peers))


def read_lines(path: Path) -> list[Found]:
    """Lines of a file of JSON; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def merged(kept: Sequence[Found], new: Sequence[Found]) -> list[Found]:
    """Lines of all machines: those of a machine and load that were measured anew are replaced."""
    anew = {(line["machine"], line["load"]) for line in new}
    return [*(k for k in kept if (k["machine"], k["load"]) not in anew), *new]


def search(
    runs: Runs, load: Load, job: Mapping[str, Any], peer: Peer, folder: Path, limit_s: float
) -> None:
    """Try sizes of a peer's micro-batch, small ones first, and keep the time of each."""
    begun, best, worse = time.monotonic(), float("inf"), 0
    for rows in (r for r in ROWS if r <= load.sequences):
        if worse >= WORSE or time.monotonic() - begun > limit_s:
            return
        key = {"tried": rows, "load": load.name, "who": peer.name, "job": digest(job)}
        if not runs.have(key):
            place = folder / f"{load.key}-{peer.name}-{rows}-rows"
            step_s = peer.run({**job, "rows": rows}, 2, place)["step_s"][-1]
            runs.add({**key, "machine": machine(), "step_s": step_s})
            print(f"{load.name}, {peer.name}, {rows} rows: {step_s:.2f} s", flush=True)
        step_s = runs.find(key)["step_s"]
        worse = 0 if step_s < best else worse + 1
        best = min(best, step_s)


def best_rows(runs: Runs, load: Load, job: Mapping[str, Any], peer: Peer) -> int:
    """The micro-batch of a peer's fastest try."""
    tried = runs.tried(load.name, peer.name, digest(job))
    return int(min(tried, key=lambda line: line["step_s"])["tried"])


class Runs:
    """The file of what was measured."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found: list[Found] = [json.loads(line) for line in lines]

    def have(self, key: Found) -> bool:
        """Whether this run is there."""
        return any(key.items() <= found.items() for found in self._found)

    def find(self, key: Found) -> Found:
        """The run of this key, which is there."""
        return next(found for found in self._found if key.items() <= found.items())

    def tried(self, load: str, who: str, job: str) -> list[Found]:
        """What was tried in the search of a micro-batch."""
        of = {"load": load, "who": who, "job": job}
        return [f for f in self._found if "tried" in f and of.items() <= f.items()]

    def add(self, found: Found) -> None:
        """Keep it."""
        self._found.append(found)
        with self._path.open("a") as file:
            file.write(json.dumps(found) + "\n")

    def of(self, jobs: Mapping[str, Any]) -> list[Found]:
        """Runs of these jobs."""
        known = [f for f in self._found if "round" in f and f["load"] in jobs]
        return [f for f in known if f["job"] == digest(jobs[f["load"]])]


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
    rows = {peer.name: best_rows(runs, load, job, peer) for peer in peers}
    for peer in peers:
        given = {**job, "rows": rows[peer.name]}
        turns.append((peer.name, partial(peer.run, given, load.steps["peer"])))
    for who, run in turns if round_ % 2 else reversed(turns):
        key = {"round": round_, "load": load.name, "who": who, "job": digest(job)}
        if runs.have(key):
            continue
        place = folder / f"{load.key}-{who}-{round_}".replace(" ", "_").replace(",", "")
        busy = psutil.cpu_percent(interval=2.0) / 100 * (os.cpu_count() or 1)
        skipped = SKIPPED.get(who, PEER_SKIPPED)
        steps = {name: v[skipped:] for name, v in run(place).items() if isinstance(v, list)}
        means = {name: statistics.mean(values) for name, values in steps.items()}
        line = {**key, **means, "busy": busy, "machine": machine()}
        runs.add(line | ({"rows": rows[who]} if who in rows else {}))
        print(f"round {round_}, {load.name}, {who}: {means['step_s']:.2f} s a step", flush=True)


def page(found: Sequence[Found], peers: Sequence[str]) -> str:
    """The whole result, with what was measured how: a section for each machine."""
    refusals = "\n".join(f"- {name}: {words}" for name, words in REFUSALS.items())
    sections = [section(each, found, peers) for each in machines_of(found)]
    return "\n".join(
        [
            "# rlcore beside its peers\n",
            "`benchmarks/peers/peers.py`: medians of the rounds, in brackets the smallest and the "
            "largest. The limit is the larger of engine and learner alone, each with the core that "
            "it has in the run.\n",
            *sections,
            "Prompts are of the same task, and the same ones only where they are long. rlcore "
            "stores 20 top log-probs of every token, peers only the sampled one's. A peer's "
            f"micro-batch is the fastest of {ROWS[0]} to {ROWS[-1]} sequences.\n",
            f"Peers that were not measured:\n\n{refusals}\n",
        ]
    )


def section(name: str, found: Sequence[Found], peers: Sequence[str]) -> str:
    """The tables of one machine."""
    own = [f for f in found if f["machine"] == name]
    measured = [f for f in own if "said" not in f]
    if not measured:
        tables = f"{short_table(own, peers)}\n\n{table([f['parts'] for f in own])}"
        return f"## {name}\n\nOf an earlier version, without a search.\n\n{tables}\n"
    busiest = max(f["busy"] for f in measured)
    valid = "" if busiest <= QUIET else " **The machine was busy: these figures do not count.**"
    rounds = 1 + max(f["round"] for f in measured)
    parts = [details(measured, load, peers) for load in loads_of(measured)]
    return (
        f"## {name}\n\n{rounds} rounds. Before each run other processes kept at most "
        f"{busiest:.1f} cores busy.{valid}\n\n{short_table(own, peers)}\n\n{table(parts)}\n"
    )


def machines_of(found: Sequence[Found]) -> list[str]:
    """In the order of their first lines."""
    return list(dict.fromkeys(f["machine"] for f in found))


def short_table(found: Sequence[Found], peers: Sequence[str]) -> str:
    """The table of docs/experiments.md."""
    rows = []
    for name in machines_of(found):
        of = [f for f in found if f["machine"] == name]
        for load in loads_of(of):
            given = {"machine": name, "load": described(load)}
            rows += [given | f["said"] for f in of if f["load"] == load and "said" in f]
            own = by_round(of, load, ASYNC)
            for peer in peers if own else ():
                theirs = by_round(of, load, peer)
                ratios = [theirs[r] / own[r] for r in sorted(own.keys() & theirs.keys())]
                row = given | {f"{peer}, s a step": spread(theirs.values())}
                row |= {"rlcore, s a step": spread(own.values()), "times": spread(ratios)}
                rows.append(row)
    return table(rows)


def details(found: Sequence[Found], load: str, peers: Sequence[str]) -> dict[str, str]:
    """rlcore's own parts on a load of one machine, and the tokens that everybody sampled."""
    own, turned = by_round(found, load, ASYNC), by_round(found, load, ON_POLICY)
    engine = by_round(found, load, ON_POLICY, "wait_s")
    learner = by_round(found, load, ON_POLICY, "learn_s")
    limit = {r: max(engine[r], learner[r]) for r in engine}
    both = sorted(own.keys() & turned.keys())
    sampled = {who: by_round(found, load, who, "tokens").values() for who in (ASYNC, *peers)}
    rows = {f["who"]: f["rows"] for f in found if f["load"] == load and "rows" in f}
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
        "micro-batch": "; ".join(f"{who} {count}" for who, count in rows.items()),
    }


def loads_of(found: Sequence[Found]) -> list[str]:
    return [load.name for load in LOADS if any(f["load"] == load.name for f in found)]


def described(name: str) -> str:
    """A load by its sizes."""
    load = next(load for load in LOADS if load.name == name)
    return f"{name}: {load.sequences} sequences of at most {load.max_tokens} tokens"


def by_round(found: Iterable[Found], load: str, who: str, what: str = "step_s") -> dict[int, float]:
    """A figure of a party on a load, by round."""
    of = [f for f in found if "round" in f and (f["load"], f["who"]) == (load, who)]
    return {f["round"]: f[what] for f in of}


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
