"""Parts of `check.py` that decode: engines as in a run, their log-probs, then their speed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from decode_profile import decode_profile, decoding, prefilled
from reference import Judge, Reference
from setting import Row, Setting

LOGPROBS_K = 20
# part -> (kind of actor, its settings)
VARIANTS: dict[str, tuple[str, Row]] = {
    "bf16 eager": ("bf16", {"enforce_eager": True}),
    "bf16 first runner": ("bf16", {"second_runner": False, "async_scheduling": False}),
}


def prompts(count: int, length: int) -> list[Any]:
    import numpy as np

    return [
        np.random.default_rng(i).integers(3, 500, length).astype(np.int32) for i in range(count)
    ]


def engine(
    s: Setting, kind: str, *, model: str | None = None, memory: float = 0.6, **settings: Any
) -> Any:
    """An actor of `kind` as in a run, without the prefix cache, which would make a repeated prompt
    free."""
    from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine

    fp8: Row = {"kind": "fp8", "rounding": "fp8" if s.small else "none"}  # emulated on CPU
    options: dict[str, Row] = {
        "bf16": {},
        **{k: {"kind": "sparse", "sparse": s.rule_of(k)} for k in ("sparse", "sparse block")},
        "fp8": fp8,
        "fp8 + fp8 kv": fp8 | {"fp8_kv_cache": True},
    }
    if s.small:
        settings |= {"enforce_eager": True}
    actor = ActorSpec(
        num_gpus=0 if s.small else 1,
        max_num_seqs=max((*s.batches, s.batch)),
        kv_cache_gib=0.1,
        gpu_memory_utilization=memory,
        prefix_caching=False,
        **options[kind],
        **settings,
    )
    max_len = max(s.contexts) + 256
    return start_engine(EngineJob(actor, "check-0", model or s.model, max_len, LOGPROBS_K))


def generate(llm: Any, asked: list[Any], new_tokens: int) -> tuple[list[Any], float]:
    """Finished trajectories by sample, and seconds."""
    ask(llm, asked, new_tokens)
    start, done = time.monotonic(), []
    while llm.unfinished():
        done += llm.step()
    return sorted(done, key=lambda t: t.sample_index), time.monotonic() - start


def ask(
    llm: Any, asked: list[Any], new_tokens: int, k: int = LOGPROBS_K, temperature: float = 1.0
) -> None:
    """Queue a request for each prompt; `k`: log-probs of how many tokens."""
    from rlcore.testing.records import make_sampling
    from rlcore.types import Request

    spec = make_sampling(max_new_tokens=new_tokens, logprobs_k=k, temperature=temperature)
    llm.add([Request(0, i, "check/train/0", p, spec, seed=i) for i, p in enumerate(asked)])


def rollout(s: Setting, part: str) -> None:
    """Log-probs and rates of one actor: at every batch with and without seeds, then at every
    context, and where a step's time goes at the longest."""
    kind, settings = VARIANTS.get(part, (part, {}))
    start = time.monotonic()
    llm = engine(s, kind, **settings)
    s.add(part, {"emulated": s.small and kind == "fp8", "start s": time.monotonic() - start})
    judge = Judge(s, kind)
    length = 96 if s.small else 768  # beyond the sparse budget
    samples, _ = generate(llm, prompts(4, length), s.new_tokens // 2)  # also warms the engine up
    s.add(part, {"context": length, **judge.row(samples)})
    if kind != "bf16":  # for scale: what the actor differs by from the policy it stands for
        plain = Reference(s, "dense").gaps(samples)
        s.add(part, {f"{name} to the plain policy": gap for name, gap in plain.items()})
    if kind == "bf16":
        for seeded in (True, False):
            for batch in s.batches:
                row = timed(s, llm, judge, prompts(batch, length))
                s.add(part, {"batch": batch, "seeded": seeded, **row})
            unseeded(llm)
    if part not in VARIANTS:
        for context in s.contexts:
            row = timed(s, llm, judge, prompts(s.batch, context))
            s.add(part, {"batch": s.batch, "context": context, **row})
        if not s.small:
            longest = max(s.contexts)
            queue = partial(_queue, prompts(s.batch, longest))
            row = decode_profile(llm, queue, prefilled(llm, queue)[0])
            s.add(part, {"batch": s.batch, "context": longest, **row})
    llm.close()


def timed(s: Setting, llm: Any, judge: Judge, asked: list[Any]) -> Row:
    """Gaps of some of the samples, and the speed if they are small enough."""
    queue = partial(_queue, asked)
    prefill, prefill_s = prefilled(llm, queue)
    done, rate = decoding(llm, queue, s.new_tokens, prefill)
    done.sort(key=lambda t: t.sample_index)
    return judge.row(done[:2], {"decode tokens/s": rate, "prefill s": prefill_s})


def _queue(asked: list[Any], llm: Any, new_tokens: int, k: int = LOGPROBS_K) -> None:
    ask(llm, asked, new_tokens, k)


def logprobs(s: Setting) -> None:
    """Where a step's time goes at the largest batch: with the top k log-probs of every token, with
    the sampled one's alone, and with the top k copied to the host every step."""
    llm = engine(s, "bf16")
    batch = max(s.batches)
    asked = prompts(batch, 96 if s.small else 768)
    prefill = prefilled(llm, partial(_queue, asked))[0]
    if llm.core.copied is not None:  # a GPU has yet to show it
        llm.core.copied = llm.core.rpc("rl_keep_rows", True)
    for k, kept in ((LOGPROBS_K, True), (0, True), (LOGPROBS_K, False)):
        if not kept:
            llm.core.rpc(_copy_rows_every_step)
        row = decode_profile(llm, partial(_queue, asked, k=k), prefill)
        s.add("logprobs", {"batch": batch, "k": k, "copied": llm.core.copied or not kept, **row})
    llm.close()


def _copy_rows_every_step(worker: Any) -> None:
    """Undo `rl_keep_rows` in a worker, whose runner has the plain method again."""
    del worker.model_runner.sample


def speculate(s: Setting) -> None:
    """The model itself proposes: the log-probs of what is sampled, and the share of proposals that
    is accepted when answers are greedy, as proposals are."""
    from rlcore.rollout.specs import SpeculateSpec

    start = time.monotonic()
    llm = engine(s, "bf16", memory=0.3, speculate=SpeculateSpec(path=s.model))
    s.add("speculate", {"start s": time.monotonic() - start})
    asked = prompts(s.batch, 96 if s.small else 768)
    for temperature in (1.0, 0.0):
        ask(llm, asked, s.new_tokens, temperature=temperature)
        done, proposed, accepted = [], 0, 0
        while llm.unfinished():
            done += llm.step()
            load = llm.load_of_step()
            proposed, accepted = proposed + load.proposed, accepted + load.accepted
        done.sort(key=lambda t: t.sample_index)
        gaps = Judge(s, "bf16").row(done[:4]) if temperature else {}
        s.add("speculate", {"temperature": temperature, **gaps, **taken(proposed, accepted)})
    check_taken(proposed, accepted)
    llm.close()


def taken(proposed: int, accepted: int) -> Row:
    """How many tokens were proposed, and the share of them that was accepted."""
    return {"proposed": proposed, "accepted": accepted / proposed if proposed else None}


def check_taken(proposed: int, accepted: int) -> None:
    """Raise RuntimeError unless a model accepts most of its own greedy proposals; those that it
    does not are near ties."""
    if 2 * accepted < proposed or not accepted:
        raise RuntimeError(
            f"{accepted} of {proposed} greedy proposals of the model itself accepted"
        )


def unseeded(llm: Any) -> None:
    """Have vLLM seed all later requests of the engine by itself."""
    processor = llm.core._llm.input_processor
    process = processor.process_inputs

    def without_seed(name: str, prompt: Any, params: Any, **kwargs: Any) -> Any:
        params.seed = None
        return process(name, prompt, params, **kwargs)

    processor.process_inputs = without_seed


def update(s: Setting) -> None:
    """FP8 weights loaded in place: against an engine started with them, and a reference of them."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlcore.models.folder import read_weights
    from rlcore.weights.stream import whole

    other = str(s.folder / "other")
    # on the GPU: a minute of drawing billions of numbers on the host
    moved = AutoModelForCausalLM.from_pretrained(s.model, dtype=s.dtype).to(s.device)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.1 * p.abs().mean() * torch.randn_like(p))
    moved.save_pretrained(other)
    AutoTokenizer.from_pretrained(s.model).save_pretrained(other)
    del moved, p
    if not s.small:
        torch.cuda.empty_cache()
    asked = prompts(s.batch, min(256, min(s.contexts)))
    # eager and small, because the first engine may not release all GPU memory when it closes
    small: Row = {"memory": 0.4, "enforce_eager": True}
    llm = engine(s, "fp8", **small)
    before, _ = generate(llm, asked, s.new_tokens // 2)
    start = time.monotonic()
    llm.update_weights(1, whole(read_weights(other)), "in_flight")
    seconds = time.monotonic() - start
    updated, _ = generate(llm, asked, s.new_tokens // 2)
    llm.close()
    fresh, _ = generate(engine(s, "fp8", model=other, **small), asked, s.new_tokens // 2)

    def same(a: list[Any], b: list[Any]) -> list[bool]:
        return [np.array_equal(x.sampled_ids, y.sampled_ids) for x, y in zip(a, b)]

    row = {
        "same as a fresh engine": f"{sum(same(updated, fresh))}/{len(fresh)}",
        "same as before it": f"{sum(same(updated, before))}/{len(fresh)}",
    }
    s.add("update", row | Judge(s, "fp8", model=other).row(updated[:4], {"update s": seconds}))
