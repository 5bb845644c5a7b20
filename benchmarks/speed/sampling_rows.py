"""What a step of the CPU engine does with its logits to store top log-probs, on one thread.

    python -m benchmarks.speed.sampling_rows [--topk 20] [--rounds 15]

Milliseconds of processor time for rows of random logits: the log-softmax that any log-prob needs,
torch's top k and rlcore's (`rlcore/models/largest.py`), and for comparison the product that made
the logits, with the width of a model that has such a vocabulary. The lowest quarter's upper end
counts: other load can only slow an operation down.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.harness import machine, table
from rlcore.models.largest import largest

# rows, vocabulary, width: SmolLM2-135M, Qwen3-0.6B
SIZES = ((32, 49_152, 576), (128, 49_152, 576), (32, 151_936, 1024), (128, 151_936, 1024))


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        run()
        taken.append(time.process_time() - begun)
    return 1e3 * sorted(taken)[rounds // 4]


def row(rows: int, vocabulary: int, width: int, args: argparse.Namespace) -> dict[str, object]:
    hidden, weight = torch.randn(rows, width), torch.randn(vocabulary, width) / width**0.5
    logits = hidden @ weight.t()
    logp = logits.log_softmax(dim=-1)
    parts = {
        "log-softmax": lambda: logits.log_softmax(dim=-1),
        "torch.topk": lambda: torch.topk(logp, args.topk, dim=-1),
        "largest": lambda: largest(logp, args.topk),
        "head's product": lambda: torch.mm(hidden, weight.t()),
    }
    found: dict[str, object] = {"rows": rows, "vocabulary": vocabulary, "width": width}
    for name, run in parts.items():
        found[name] = f"{milliseconds(run, args.rounds):.1f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topk", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"Milliseconds, k = {args.topk}; {machine()}\n")
    print(table([row(*sizes, args) for sizes in SIZES]))


if __name__ == "__main__":
    main()
