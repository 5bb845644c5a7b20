"""Peak extra memory and time of the chunked LM-head pass against the plain one, with backward.

    python -m benchmarks.memory.head_memory --tokens 8192 --vocab 151936 --hidden 256 --threads 2

Plain: logits in float32, log-softmax, gather, entropy, top k, backward. Each way runs in its own
process. Extra memory is the growth of the process's peak resident memory (on CUDA: of the
allocator's peak) beyond inputs and weights.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from benchmarks.harness import again
from rlcore.learner.specs import LearnerSpec


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Wall seconds, CPU seconds (less affected by other load) and extra MiB of one way."""
    from rlcore.learner.lm_head import HeadSpec, head_pass

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, device=args.device, dtype=dtype).requires_grad_()
    weight = (
        (torch.randn(args.vocab, args.hidden, device=args.device) * 0.05).to(dtype).requires_grad_()
    )
    targets = torch.randint(0, args.vocab, (args.tokens,), device=args.device)

    def run(n: int) -> None:
        if args.way == "chunked":
            scores = head_pass(
                hidden[:n], weight, targets[:n], HeadSpec(1.0, args.chunk, topk=args.topk)
            )
            scores.logp.sum().backward()
            return
        logp = torch.log_softmax((hidden[:n] @ weight.t()).float(), dim=-1)
        chosen = logp.gather(1, targets[:n, None])
        with torch.no_grad():
            # in pieces, so that entropy and top k add no memory peak of their own
            for part in logp.detach().split(256):
                (part.exp() * part).sum(-1)
                if args.topk:
                    part.topk(args.topk)
        chosen.sum().backward()

    run(8)  # loads libraries and allocates the weight's gradient
    before = peak_mib(args.device, reset=True)
    if args.device == "cuda":
        torch.cuda.synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    run(args.tokens)
    if args.device == "cuda":
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu, "extra_mib": peak_mib(args.device) - before}


def peak_mib(device: str, *, reset: bool = False) -> float:
    """Peak memory so far. `reset` (CUDA): restart the peak from the current allocation."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    chunk = LearnerSpec().head_chunk_tokens
    parser.add_argument("--chunk", type=int, default=chunk, help="learner.head_chunk_tokens")
    parser.add_argument("--topk", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--way", choices=["plain", "chunked"], help="measure one way in this process and print JSON"
    )
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    rows = {}
    for way in ("plain", "chunked"):
        runs = []
        for _ in range(args.repeats):
            command = [*again(__spec__), *sys.argv[1:], "--way", way]
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if out.returncode != 0:
                sys.exit(
                    f"{way} failed with {out.returncode} (out of memory?): {out.stderr[-500:]}"
                )
            runs.append(json.loads(out.stdout.splitlines()[-1]))
        rows[way] = {key: min(run[key] for run in runs) for key in runs[0]}
    print(
        f"{args.tokens} tokens, vocabulary {args.vocab}, hidden {args.hidden}, {args.dtype}, "
        f"{args.device}, {args.threads} threads, top k {args.topk}, chunks of {args.chunk}"
    )
    print("| way | peak extra MiB | forward + backward, s | CPU s |\n| --- | --- | --- | --- |")
    for way, row in rows.items():
        print(
            f"| {way} | {row['extra_mib']:.0f} | {row['seconds']:.2f} | {row['cpu_seconds']:.2f} |"
        )
    plain, chunked = rows["plain"], rows["chunked"]
    wall, cpu = (chunked[key] / plain[key] for key in ("seconds", "cpu_seconds"))
    saving = plain["extra_mib"] / chunked["extra_mib"]
    print(f"| ratio | 1/{saving:.1f} | {wall:.2f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
