"""The part `experts` of `check.py`: a small mixture of experts with an engine's log-probs, its
experts and its updates held against the learner's."""

from __future__ import annotations

import importlib.util
import math
import time
from typing import Any

import numpy as np
import torch
from rollouts import LOGPROBS_K, generate, prompts
from setting import Row, Setting

SHAPE = {  # experts as small as Triton's tiles allow; 32 of them, of which 4 a token
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
SMALL = SHAPE | {  # the dry run's
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
}
TOKENS = {"cuda": 64, "cpu": 12}


def experts(s: Setting) -> None:
    """Rows as they are measured, of engines without graphs."""
    folders = write(s)
    asked = prompts(s.batch, 40)
    if s.small and importlib.util.find_spec("vllm.config.aux_output") is None:
        row = {"engine": "skipped: mixtures on a CPU need vLLM 0.32; random records instead"}
        s.add("experts", row | compared(s, folders[0], random_records(asked)))
        return
    llm = engine(s, folders[0], eager=True)
    before, _ = generate(llm, asked, TOKENS[s.device])
    s.add("experts", {"engine": "eager", **compared(s, folders[0], before)})
    updated = update(s, llm, folders[1], asked)
    llm.close()
    llm = engine(s, folders[1], eager=True)
    fresh, _ = generate(llm, asked, TOKENS[s.device])
    same = {
        "as a fresh engine": equal(updated, fresh),
        "as before the update": equal(updated, before),
    }
    s.add("experts", {"engine": "updated in place", **same})
    s.add("experts", {"engine": "updated in place", **compared(s, folders[1], updated)})
    llm.close()


def random_records(asked: list[Any]) -> list[Any]:
    """Records of no engine, with random tokens and experts: what reads records can be tried."""
    from rlcore.models.routes import ROUTES
    from rlcore.testing.records import make_trajectory

    rng = np.random.default_rng(0)
    records = []
    for prompt in asked:
        drawn = rng.integers(3, 500, TOKENS["cpu"])
        shape = (len(prompt) + len(drawn) - 1, SMALL["num_hidden_layers"], SMALL["num_experts"])
        experts = rng.random(shape).argsort(-1)[:, :, : SMALL["num_experts_per_tok"]]
        extras = {ROUTES: experts.astype(np.uint8)}
        records.append(make_trajectory(turns=((prompt, drawn),), extras=extras))
    return records


def with_graphs(s: Setting) -> None:
    """The same of an engine that compiles and captures graphs, which is the default on GPUs."""
    folders = write(s)
    asked = prompts(s.batch, 40)
    start = time.monotonic()
    llm = engine(s, folders[0], eager=False)
    seconds = time.monotonic() - start
    done, _ = generate(llm, asked, TOKENS[s.device])
    row = {"engine": "with graphs", "start s": seconds}
    s.add("experts graphs", row | compared(s, folders[0], done))
    updated = update(s, llm, folders[1], asked)
    s.add("experts graphs", {"engine": "updated", **compared(s, folders[1], updated)})
    llm.close()


def write(s: Setting) -> tuple[str, str]:
    """Folders of a random mixture and of one whose weights differ from it by a tenth."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from rlcore.models.fresh import build_char_tokenizer

    tokenizer = build_char_tokenizer("0123456789")
    config = Qwen3MoeConfig(
        **(SMALL if s.small else SHAPE),
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    lm = Qwen3MoeForCausalLM(config)
    with torch.no_grad():  # a nearly uniform head or router would show no error
        torch.nn.init.normal_(lm.lm_head.weight, std=2 / math.sqrt(config.hidden_size))
        for layer in lm.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight, std=2 / math.sqrt(config.hidden_size))
    folders = (str(s.folder / "mixture"), str(s.folder / "mixture moved"))
    for path in folders:
        lm.to(s.dtype).save_pretrained(path)
        tokenizer.save_pretrained(path)
        with torch.no_grad():
            for p in lm.parameters():
                p.add_(0.1 * p.abs().mean() * torch.randn_like(p))
    return folders


def engine(s: Setting, model: str, *, eager: bool) -> Any:
    """An actor as in a run that replays routes; prefixes are cached, and their experts with
    them."""
    from rlcore.rollout.specs import ActorSpec, EngineJob, start_engine

    actor = ActorSpec(
        num_gpus=0 if s.small else 1,
        max_num_seqs=s.batch,
        kv_cache_gib=0.1,
        gpu_memory_utilization=0.3,
        enforce_eager=eager,
        async_scheduling=False if eager else None,  # with graphs as in a run
    )
    return start_engine(EngineJob(actor, "check-0", model, 256, LOGPROBS_K, routes=True))


def update(s: Setting, llm: Any, folder: str, asked: list[Any]) -> list[Any]:
    """Load the weights of `folder` in place, of which every checksum is compared; what the engine
    samples then."""
    from rlcore.models.folder import read_weights
    from rlcore.weights.manifest import make_manifest, verify_checksums
    from rlcore.weights.stream import whole

    tensors = read_weights(folder)
    manifest = make_manifest(1, tensors, full=True, seed=0)
    start = time.monotonic()
    llm.update_weights(1, whole(tensors), "in_flight")
    seconds = time.monotonic() - start
    verify_checksums(manifest, llm.checksums(manifest.names))
    done, _ = generate(llm, asked, TOKENS[s.device])
    row = {"checksums": f"{len(manifest.names)} equal", "update s": seconds}
    s.add("experts", {"engine": "updated in place", **row})
    return done


def equal(a: list[Any], b: list[Any]) -> str:
    same = [np.array_equal(x.sampled_ids, y.sampled_ids) for x, y in zip(a, b)]
    return f"{sum(same)}/{len(same)}"


def compared(s: Setting, model: str, samples: list[Any]) -> Row:
    """An engine's log-probs against the learner's, whose routers choose by themselves or replay;
    for scale, the learner's own against float32."""
    from rlcore.learner.sequences import read_next_tokens, read_with_routes
    from rlcore.models.routes import ROUTES

    theirs = torch.cat([torch.tensor(t.logp_inf) for t in samples])
    row: Row = {"tokens": len(theirs), "routes": str(samples[0].extras[ROUTES].dtype)}
    found = {}
    for how, read in (("live", read_next_tokens), ("replayed", read_with_routes)):
        found[how], share = log_probs(s, model, [read(t) for t in samples], s.dtype)
        gaps = (found[how] - theirs).abs()
        row |= {f"mean |dlogp| {how}": float(gaps.mean()), f"max {how}": float(gaps.max())}
        if how == "replayed":
            row["routes differ"] = share
    if not s.small:
        sequences = [read_with_routes(t) for t in samples]
        exact, _ = log_probs(s, model, sequences, torch.float32)
        row["learner's to float32, replayed"] = float((found["replayed"] - exact).abs().mean())
    return row


def log_probs(
    s: Setting, model: str, sequences: list[Any], dtype: torch.dtype
) -> tuple[torch.Tensor, float]:
    """Of the samples in order, on the CPU; the share of pairs whose experts differ."""
    from rlcore.learner.lm_head import HeadSpec
    from rlcore.learner.packing import pack
    from rlcore.learner.parts.replay import Replay
    from rlcore.learner.policy import Policy, load_causal_lm

    name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    lm = load_causal_lm(model, name, "sdpa").to(s.device).train()
    policy = Policy(lm, None, Replay(lm))
    spec = HeadSpec(1.0, 1024)
    parts: dict[int, torch.Tensor] = {}
    for mb in pack([(q,) for q in sequences], 4096, "sorted", device=s.device):
        logp = policy(mb, None, spec)[1].detach().float().cpu()
        for row, index in enumerate(mb.episodes.tolist()):
            parts[index] = logp[(mb.row == row).cpu()]
    share = policy.replay.metrics(lambda counts: counts)["mismatch/routes_differ"]
    return torch.cat([parts[i] for i in range(len(sequences))]), share
