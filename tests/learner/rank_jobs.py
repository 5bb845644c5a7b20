"""What the learner tests run inside rank processes. Each job returns plain numpy so that any
process can read it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_helpers import make_groups, make_job, make_place, with_rewards
from safetensors.torch import load_file

from rlcore.attention.specs import SparseSpec
from rlcore.corrections.specs import CORRECTIONS, Stratum
from rlcore.learner import limits, split_loading
from rlcore.learner.batch import PolicyScores, build_batch
from rlcore.learner.engines.deepspeed import ZeroEngine
from rlcore.learner.lm_head import HeadSpec
from rlcore.learner.rank import LearnerRank
from rlcore.learner.sequences import TokenSequence
from rlcore.learner.split_loading import load_split
from rlcore.learner.update import Update
from rlcore.models.routes import ROUTES
from rlcore.registry import load_object
from rlcore.types import POLICY, Group

JACKPOT: dict[str, dict[str, Any]] = {"jackpot": {}, "veto": {"threshold": 1e-4}}
CENTRE: dict[str, dict[str, Any]] = {"centre": {}, "tis": {}}
RECORDING = "rank_jobs:RecordingEngine"


class RecordingEngine(ZeroEngine):
    """Keeps what the last step's gradients were, and how many micro-batches they came from."""

    backwards = 0

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.backwards += 1
        super().backward(loss, last=last)

    def grad_norm(self) -> float:
        self.gradients = {name: g.numpy() for name, g in self.full_gradients()}
        return super().grad_norm()


def learner(rank: int, world: int, port: int, model: str, **over: Any) -> LearnerRank:
    return LearnerRank(make_job(model, **over), make_place(rank, world, port))


def state(one: LearnerRank, name: str = POLICY) -> dict[str, np.ndarray]:
    """Whole float32 weights."""
    return arrays(dict(one.published_weights(name, "float32")))


def untimed(row: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in row.items() if not k.startswith("time/")}


def share(groups: list[Group], rank: int, world: int) -> list[Group]:
    """Unequal shares on purpose: the last rank has one group."""
    return groups if world == 1 else (groups[:-1] if rank == 0 else groups[-1:])


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: t.numpy() for name, t in tensors.items()}


def gradients_at(
    one: LearnerRank, groups: list[list[Group]]
) -> tuple[dict[str, np.ndarray], float, int]:
    """Whole gradients of a phase's first step, their norm, and the number of micro-batches."""
    one.begin_phase(groups)
    row = one.train_step(0)
    assert isinstance(one.engine, RecordingEngine)
    return one.engine.gradients, row["grad_norm"], one.engine.backwards


def gradient_table(
    rank: int, world: int, port: int, model: str
) -> dict[str, dict[tuple[int, int | str, str], Any]]:
    """Correction -> (stage, micro-batch tokens, layout) -> gradients, norm, micro-batches. Jackpot
    needs statistics of the batch, and centring the log-probs of the actor's tokens."""
    layouts = ((10_000, "sorted"), (25, "sorted"), (40, "packed"), ("auto", "sorted"))
    every = [(stage, *layout) for stage in (0, 3) for layout in layouts]
    every += [(stage, *layout) for stage in (1, 2) for layout in layouts[1:3]]
    some = [(0, *layouts[0]), (0, *layouts[2]), (3, *layouts[2])]
    mine = share(make_groups(5), rank, world)

    def found(corrections: dict[str, Any], stage: int, tokens: int | str, layout: str) -> Any:
        limits.ROOM["cpu"] = limits.ActivationBudget(1, 25, 25)  # all would fit
        one = learner(
            *(rank, world, port, model),
            zero_stage=stage,
            corrections=corrections,
            entropy_coef=0.01,
            micro_batch_tokens=tokens,
            layout=layout,
            share_prefix="off",  # the layouts that are asked for: see `sharing_table`
            engine=RECORDING,
        )
        return gradients_at(one, [mine, mine])

    return {
        "jackpot": {s: found(JACKPOT, *s) for s in every},
        "centre": {s: found(CENTRE, *s) for s in some},
        "tis": {some[0]: found({"tis": {}}, *some[0])},
    }


def sharing_table(rank: int, world: int, port: int, model: str) -> dict[tuple[str, str], Any]:
    """(variant, learner.share_prefix) -> gradients and row of a phase's first step.

    The last rank has one group of six, and dummies.
    """
    variants: dict[str, dict[str, Any]] = {
        f"stage {stage}": {"zero_stage": stage, "corrections": JACKPOT} for stage in (0, 1, 2, 3)
    }
    variants |= {
        "checkpointing": {"gradient_checkpointing": True, "zero_stage": 3, "kl_coef": 0.1},
        "lora": {"lora": {"rank": 4}, "zero_stage": 3},
        "sparse": {"train_sparse": True, "sparse": SparseSpec(block_size=2, blocks=2)},
        "sparse, kl": {
            **{"train_sparse": True, "sparse": SparseSpec(block_size=2, share=0.5)},
            **{"kl_coef": 0.1, "zero_stage": 3},
        },
        "distill k3": {"distill": {"kl": "k3"}, "sparse": SparseSpec(block_size=2, blocks=2)},
        "sparse, lora": {
            **{"train_sparse": True, "sparse": SparseSpec(block_size=2, blocks=2)},
            **{"lora": {"rank": 4}, "gradient_checkpointing": True},
        },
        "distill, checkpointing": {
            **{"distill": {"kl": "k1"}, "sparse": SparseSpec(block_size=2, blocks=2)},
            **{"gradient_checkpointing": True, "kl_coef": 0.1, "zero_stage": 2},
        },
        "distill full": {"distill": {"kl": "full"}, "sparse": SparseSpec(block_size=2, blocks=2)},
        "accepted": {"keep_by_acceptance": 4, "corrections": {"ais": {}}, "entropy_coef": 0.01},
    }
    out = {}
    mine = share(make_groups(6, samples=6), rank, world)
    for name, options in variants.items():
        for sharing in ("off", "auto"):
            settings = options | {"share_prefix": sharing, "micro_batch_tokens": 40}
            one = learner(rank, world, port, model, engine=RECORDING, **settings)
            one.begin_phase([mine, mine])
            row = untimed(one.train_step(0))
            assert isinstance(one.engine, RecordingEngine)
            out[name, sharing] = one.engine.gradients, row
    return out


def phase_rows(
    rank: int, world: int, port: int, model: str, options: dict[str, Any]
) -> list[dict[str, float]]:
    """Metrics of a phase of three steps, without times."""
    one = learner(rank, world, port, model, **options)
    steps = [make_groups(5, seed=s, first_id=10 * s) for s in range(3)]
    one.begin_phase([share(groups, rank, world) for groups in steps])
    return [untimed(one.train_step(s)) for s in range(3)]


def all_phase_rows(
    rank: int, world: int, port: int, model: str, variants: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, float]]]:
    return {
        name: phase_rows(rank, world, port, model, options) for name, options in variants.items()
    }


def save_and_load(
    rank: int, world: int, port: int, model: str, folder: str, stages: tuple[int, ...]
) -> dict[int, Any]:
    """stage -> (weights after 3 straight steps, the same with a stop and load after step 1, rows of
    both)."""

    def steps(one: LearnerRank, which: range) -> list[dict[str, float]]:
        rows = []
        for s in which:
            one.begin_phase([share(make_groups(4, seed=s, first_id=10 * s), rank, world)])
            rows.append(untimed(one.train_step(s)))
        return rows

    out = {}
    for stage in stages:
        here = str(Path(folder) / f"stage{stage}")
        options: dict[str, Any] = {
            "zero_stage": stage,
            "corrections": {"vcpo": {}, **JACKPOT},
            "lr_warmup_steps": 2,
            "lr_schedule": "cosine",
            "total_steps": 5,
            "weight_decay": 0.1,
            "micro_batch_tokens": 60,
        }
        straight = learner(rank, world, port, model, **options)
        steps(straight, range(1))
        straight.save(here)
        rows = steps(straight, range(1, 3))
        resumed = learner(rank, world, port, model, **options)
        resumed.load(here)
        resumed_rows = steps(resumed, range(1, 3))
        out[stage] = (state(straight), state(resumed), rows, resumed_rows)
    return out


def making_room(
    rank: int, world: int, port: int, model: str, folder: str, stages: tuple[int, ...]
) -> dict[int, Any]:
    """stage -> (weights and entries of a saved state of a learner that makes room between steps,
    those of one that does not, bytes that it moved, whether it published meanwhile)."""
    out = {}
    for stage in stages:
        found, moved, same = [], 0, True
        for name, yields in (("stays", False), ("yields", True)):
            one = learner(rank, world, port, model, zero_stage=stage, offload_while_sampling=yields)
            here = Path(folder) / f"{name}{stage}"
            for step in range(3):
                one.begin_phase([share(make_groups(4, seed=step, first_id=10 * step), rank, world)])
                one.train_step(step)
                before = state(one)
                moved = one.release()[0]
                same &= all(np.array_equal(before[n], w) for n, w in state(one).items())
                if step == 1:
                    one.save(here)
                one.reclaim()
            found += [state(one), here]
        out[stage] = (*found, moved, same)
    return out


def entries_read(
    rank: int, world: int, port: int, model: str, folder: str, stages: tuple[int, ...]
) -> dict[int, tuple[int, int, int]]:
    """stage -> (entries that this rank writes of a state, that it reads, and of the state)."""
    from rlcore.learner.state_files import StoredTensor

    read, part = [0], StoredTensor.part

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        read[0] += tensor.numel()
        return tensor

    StoredTensor.part = lambda self, *at: counted(part(self, *at))  # type: ignore[method-assign]
    out = {}
    for stage in stages:
        one = learner(rank, world, port, model, zero_stage=stage)
        one.begin_phase([share(make_groups(4), rank, world)])
        one.train_step(0)
        here = str(Path(folder) / f"stage{stage}")
        one.save(here)
        before = state(one)
        read[0] = 0
        one.load(here)
        trained = sum(p.ds_numel if stage == 3 else p.numel() for p in one.engine.trained.values())
        files = Path(here).glob(f"learner-{rank:05d}-*.safetensors")
        written = sum(t.numel() for file in files for t in load_file(file).values())
        out[stage] = (written, read[0], 3 * trained)  # with two moments of Adam
        assert all(np.array_equal(before[n], w) for n, w in state(one).items())
    return out


def decayed(rank: int, world: int, port: int, model: str) -> dict[int, dict[str, np.ndarray]]:
    """stage -> weights after a step whose decay is larger than its update."""
    out = {}
    for stage in (0, 3):
        one = learner(rank, world, port, model, zero_stage=stage, weight_decay=100.0)
        one.begin_phase([share(make_groups(4), rank, world)])
        one.train_step(0)
        out[stage] = state(one)
    return out


def load_elsewhere(
    rank: int, world: int, port: int, model: str, folder: str, stages: tuple[int, ...]
) -> dict[int, Any]:
    """Weights and the next step's gradient norm after loading a state that other ranks saved."""
    out = {}
    for stage in stages:
        one = learner(rank, world, port, model, zero_stage=stage)
        one.load(folder)
        weights = state(one)
        one.begin_phase([share(make_groups(4, seed=1, first_id=10), rank, world)])
        one.train_step(1)
        out[stage] = weights, state(one), one.engine.optimizer_steps
    return out


def oddities(rank: int, world: int, port: int, model: str) -> dict[str, Any]:
    """Bad numbers and odd shares, one after another."""
    from rlcore.errors import StageError

    out: dict[str, Any] = {}
    one = learner(rank, world, port, model, corrections={"tis": {}})
    groups = make_groups(3)

    # NaN in the engine's log-probs: the token leaves the loss and is counted
    groups[0].episodes[0].parts[0].logp_inf[0] = np.nan
    one.begin_phase([share(groups, rank, world)])
    out["nan_logp_inf"] = one.train_step(0)
    out["tokens"] = sum(g.tokens for g in groups)

    # one rank has nothing
    one.begin_phase([make_groups(3, seed=1) if rank == 0 else []])
    out["empty_share"] = one.train_step(1)

    # every token of the batch is unusable
    hopeless = make_groups(2, seed=2)
    for g in hopeless:
        for e in g.episodes:
            e.parts[0].logp_inf[:] = np.nan
    one.begin_phase([share(hopeless, rank, world)])
    out["nothing_left"] = one.train_step(2)

    # a policy that gives NaN: refused before the update
    before = state(one)
    name = "model.layers.0.mlp.down_proj.weight"
    with torch.no_grad():
        one.engine.names[name][0, 0] = torch.nan
    one.begin_phase([share(make_groups(3), rank, world)])
    try:
        one.train_step(3)
        out["nan_policy"] = "no error"
    except StageError as e:
        out["nan_policy"] = str(e)
    after = state(one)
    out["unchanged"] = all(np.array_equal(before[n], after[n]) for n in before if n != name)
    out["steps"] = one.engine.optimizer_steps
    return out


def one_pass_and_two(
    rank: int, world: int, port: int, model: str
) -> list[tuple[dict[str, np.ndarray], dict[str, float]]]:
    """Weights and metrics after two one-step phases, with p_ref from the differentiated pass and
    from its own."""
    out = []
    for ref_pass in ("auto", "always"):
        one = learner(
            rank,
            world,
            port,
            model,
            corrections={"dvp": {}, "tis": {}},
            ref_pass=ref_pass,
            micro_batch_tokens=40,
        )
        for s in range(2):
            one.begin_phase([make_groups(4, seed=s)])
            row = one.train_step(s)
        out.append((state(one), untimed(row)))
    return out


ALL_CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": {"tis": {}},
    "tis sequence": {"tis": {"level": "sequence"}},
    "tis adjusted": {"tis": {"adjusted": True}},
    "mis+veto": {"mis": {}, "veto": {}},
    "icepop": {"icepop": {}},
    "ais": {"ais": {}},
    "opsm": {"opsm": {"delta": 1e-4}},
    "tis normalised": {"tis": {"cap": 1.01, "normalised": True}},
    "m2po": {"m2po": {"budget": 1e-4}, "tis": {}},
    "outliers": {"outliers": {"threshold": 1e-4}},
    "kl_cov": {"kl_cov": {"share": 0.3}},
    "minpro": {"minpro": {}},
    "vesp": {"vesp": {}},
    "dppo": {"dppo": {"penalty": 0.1}},
    "dppo smooth": {"dppo": {"region": "smooth"}},
    "dppo topk": {"dppo": {"divergence": "topk_tv", "low": 1e-3, "high": 1e-3}},
    "jackpot expected": {"jackpot": {"mode": "expected"}},
    "vcpo": {"vcpo": {}},
    "dvp": {"dvp": {}},
    "jackpot": {"jackpot": {"tail": "residual"}},
    "jackpot mask": {"jackpot": {"mode": "mask"}},
    "jackpot reweight": {"jackpot": {"mode": "reweight"}},
    "jackpot bernoulli": {"jackpot": {"alpha_hat": "bernoulli"}},
    "jackpot new": {"jackpot": {"target": "new"}},
    "jackpot short_circuit": {"jackpot": {"target": "new", "short_circuit": True}},
    "jackpot whole": {"jackpot": {"tail": "none"}},
    "rapid": {"rapid": {}},
    "jackpot cut": {"jackpot": {"tail": "none", "c1": 10.0}},
}


def identity(
    rank: int, world: int, port: int, model: str
) -> dict[str, tuple[dict[str, np.ndarray], dict[str, float]]]:
    """Weights after a step on data whose log-probs and top k are the learner's own, under each
    correction.

    Advantages are RAPID's without a correction too: those of weight 1. k is the whole vocabulary
    but for "jackpot cut"."""
    out = {}
    for name, settings in ALL_CORRECTIONS.items():
        k = 4 if name == "jackpot cut" else 15
        groups = make_groups(4, k=k)
        one = learner(
            rank,
            world,
            port,
            model,
            corrections=settings,
            logprobs_k=k,
            advantage="group_mean",
            loss="reinforce",
        )
        _replay_own_scores(one, groups, k)
        one.begin_phase([groups])
        row = one.train_step(0)
        out[name] = state(one), row
    return out


def _replay_own_scores(one: LearnerRank, groups: list[Group], k: int) -> None:
    """Replace what the actors sent with the learner's own log-probs and its own top k.

    The micro-batches are those of the step, so that its log-probs are the same to the bit.
    """
    spec = one.job.learner
    dvp: Any = one.job.corrections.get("dvp")
    rho = None if dvp is None else dvp.rho
    temperature = one.job.sampling.temperature
    head = HeadSpec(temperature, spec.head_chunk_tokens, topk=k, safe_set_rho=rho)
    batch = build_batch(groups, with_topk=True, device=one.engine.device)
    micro = one._micro_batches(batch.episodes)
    ids = batch.sent.topk_ids_inf
    with torch.no_grad():
        parts = [(mb, one.engine.forward(mb, mb.flat(ids), head)) for mb in micro]
    own = PolicyScores.collect(batch.sent.mask.shape, parts, one.engine.device)
    for row, e in enumerate(e for g in groups for e in g.episodes):
        t, n = e.parts[0], e.tokens
        t.logp_inf[:] = own.logp[row, :n].numpy()
        t.topk_ids[:] = own.topk_ids[row, :n].numpy()
        t.topk_logp[:] = own.topk_logp[row, :n].numpy()


def learn_to_copy(rank: int, world: int, port: int, model: str, folder: str) -> dict[str, Any]:
    """Supervised steps on 'xyz=' -> 'xyz', then the exported folder read by transformers."""
    one = learner(
        rank, world, port, model, lr=3e-3, lr_warmup_steps=5, temperature=1.0, zero_stage=1
    )
    rng = np.random.default_rng(rank)
    losses = []
    for s in range(60):
        digits = rng.integers(3, 13, (24, 2))
        examples = [TokenSequence.of_answer([*d, 14], [*d, 1]) for d in digits.tolist()]
        losses.append(one.sft_step(s, examples)["loss/sft"])
    one.export(folder)
    probe = [
        TokenSequence.of_answer([5, 7, 14], [5, 7, 1]),
        TokenSequence.of_answer([3, 3, 14, 3], [9]),
    ]
    return {
        "losses": losses,
        "scores": one.score(probe),
        "bf16": {
            k: str(v.dtype) for k, v in dict(one.published_weights(POLICY, "bfloat16")).items()
        },
    }


def plain_gradient(
    rank: int, world: int, port: int, model: str
) -> tuple[dict[str, np.ndarray], float]:
    """An uncorrected PPO step's gradient and norm, for comparison with plain torch."""
    one = learner(rank, world, port, model, advantage="group_mean", engine=RECORDING)
    return gradients_at(one, [make_groups(5)])[:2]


def bfloat16(
    rank: int, world: int, port: int, model: str
) -> dict[int, tuple[float, float, dict[str, np.ndarray]]]:
    """stage -> norms with one and with many micro-batches, and the weights after the step."""
    out = {}
    for stage in (1, 2, 3):
        norms = []
        for tokens in (10_000, 25):
            one = learner(
                rank,
                world,
                port,
                model,
                dtype="bfloat16",
                zero_stage=stage,
                micro_batch_tokens=tokens,
            )
            one.begin_phase([share(make_groups(5), rank, world)])
            norms.append(one.train_step(0)["grad_norm"])
        out[stage] = (
            *norms,
            arrays(
                {k: v.float() for k, v in dict(one.published_weights(POLICY, "bfloat16")).items()}
            ),
        )
    return out


def kept_by_acceptance(rank: int, world: int, port: int, model: str) -> list[dict[str, float]]:
    """A step on the two most accepted of each three, on the same two chosen by hand, and on all."""
    options: dict[str, Any] = {"corrections": {"tis": {}}, "temperature": 1.0}
    rows = []
    for how in ("chosen", "by hand", "all"):
        keep = 2 if how == "chosen" else None
        one = learner(rank, world, port, model, keep_by_acceptance=keep, **options)
        groups = make_groups(4)
        if how == "by hand":
            for g in groups:
                parts = [e.parts[0] for e in g.episodes]
                logp = one.score([TokenSequence(t.token_ids, t.sampled) for t in parts])
                share = [
                    float(np.minimum(1.0, np.exp(ref - t.logp_inf)).mean())
                    for ref, t in zip(logp, parts)
                ]
                best = sorted(sorted(range(3), key=lambda i: -share[i])[:2])
                g.episodes = [g.episodes[i] for i in best]
        one.begin_phase([groups])
        rows.append(one.train_step(0))
    return rows


def mixture_weights(
    rank: int, world: int, port: int, model: str, router_replay: bool = False
) -> dict[int, tuple[dict[str, tuple[int, ...]], dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """stage -> announced shapes, published weights and two of them asked for alone, after a step
    on a mixture of experts, with the experts of the records if `router_replay`."""
    out = {}
    groups = make_groups(5)
    if router_replay:
        for t in (t for g in groups for e in g.episodes for t in e.parts):
            draws = np.random.default_rng(t.token_ids).random((len(t.token_ids) - 1, 2, 4))
            t.extras[ROUTES] = draws.argsort(-1)[:, :, :2].astype(np.uint8)
    mine = share(groups, rank, world)
    for stage in (0, 3):
        one = learner(
            rank, world, port, model, zero_stage=stage, lr=1e-2, router_replay=router_replay
        )
        one.begin_phase([mine])
        row = one.train_step(0)
        assert ("mismatch/routes_differ" in row) == router_replay
        shapes = one.published_shapes(POLICY)
        two = [n for n in shapes if ".experts.2." in n][:2]
        alone = arrays(dict(one.published_weights(POLICY, "float32", two)))
        out[stage] = shapes, state(one), alone
    return out


#: what passes are kept beside, by name
BESIDE_KEPT: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "adapters": {"zero_stage": 1, "lora": {"rank": 4}},
    "checkpointing": {"zero_stage": 2, "gradient_checkpointing": True},
    "kl": {"zero_stage": 1, "kl_coef": 0.1},
    "full kl": {"zero_stage": 1, "kl_coef": 0.1, "kl_estimator": "full"},
    "bfloat16": {"zero_stage": 1, "dtype": "bfloat16"},
}


def flat_and_whole(
    rank: int, world: int, port: int, model: str
) -> dict[tuple[int, str], tuple[dict[str, np.ndarray], list[dict[str, float]]]]:
    """Weights and rows of three steps, by ZeRO stage. No advantage of the second differs from 0:
    its backward passes are left out ("flat"), or computed ("whole"). Shares are unequal."""
    out = {}
    decide = Update._flat
    for stage in range(4):
        for name in ("flat", "whole"):
            Update._flat = decide if name == "flat" else lambda *_: False  # type: ignore
            one = learner(
                rank, world, port, model, zero_stage=stage, micro_batch_tokens=40, weight_decay=0.1
            )
            rows = []
            for s in range(3):
                groups = make_groups(8, seed=s)
                groups = with_rewards(groups, lambda e: 1.0) if s == 1 else groups
                one.begin_phase([share(groups, rank, world)])
                rows.append(untimed(one.train_step(s)))
            out[stage, name] = state(one), rows
    Update._flat = decide  # type: ignore[method-assign]
    return out


def kept_and_two(
    rank: int, world: int, port: int, model: str
) -> dict[tuple[str, str], tuple[dict[str, np.ndarray], dict[str, float]]]:
    """Weights and metrics after two one-step phases with statistics over several micro-batches, by
    what else is set, with passes that are kept and with a pass of its own. Shares are unequal."""
    out = {}
    ways: dict[str, dict[str, Any]] = {
        "kept": {"activation_cache_mib": 64},
        "apart": {"ref_pass": "always"},
    }
    for beside, options in BESIDE_KEPT.items():
        for name, settings in ways.items():
            job = {"corrections": {"ais": {}}, "micro_batch_tokens": 40, **options, **settings}
            one = learner(rank, world, port, model, **job)
            for s in range(2):
                one.begin_phase([share(make_groups(4, seed=s), rank, world)])
                row = one.train_step(s)
            out[beside, name] = state(one), untimed(row)
    return out


def divided(
    rank: int, world: int, port: int, model: str
) -> dict[str, tuple[list[tuple[int, int]], dict[str, np.ndarray], list[list[float]]]]:
    """How -> ((entries, entries held by this rank) of every parameter once it is loaded, published
    weights, log-probs of KL's frozen policy, its sums of logits, and log-probs after it has
    followed other weights).

    "whole" is stage 2, "divided" stage 3."""
    out = {}
    batch = build_batch(make_groups(2), with_topk=True, device=torch.device("cpu"))
    for how, stage in (("whole", 2), ("divided", 3)):
        held: list[tuple[int, int]] = []

        split_loading.load_split = partial(_load_recorded, held)
        one = learner(rank, world, port, model, zero_stage=stage, kl_coef=0.1, temperature=1.0)
        frozen = one._update.frozen
        head = HeadSpec(1.0, 64)
        mb = one._micro_batches(batch.episodes)[0]
        assert frozen is not None
        logps = [frozen.forward(mb, None, head).logp.tolist()]
        states, weight = frozen.base(mb)
        logps.append((states @ weight.t()).sum(1).tolist())
        weights = {n: 1.5 * w for n, w in one.published_weights(POLICY, "float32")}
        if not any(".experts." in n for n in one.published_shapes(POLICY)):
            shared: list[Any] = [weights]
            torch.distributed.broadcast_object_list(shared)
            one.load_frozen(shared[0])
            logps.append(frozen.forward(mb, None, head).logp.tolist())
        out[how] = held, state(one), logps
    return out


def _load_recorded(held: list[tuple[int, int]], path: Any, config: Any, split: Any, at: Any) -> Any:
    def one_by_one(p: Any) -> None:
        entries = p.numel()
        split(p)
        held.append((entries, p.numel() + p.ds_tensor.numel()))

    return load_split(path, config, one_by_one, at)


def kinds_and_probes(
    rank: int, world: int, port: int, model: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The first row of a fleet of two kinds, and that of each kind's groups alone: the same
    weights, and the same samples with the log-probs that the actors recorded."""
    groups = make_groups(6)
    for g in groups[::2]:
        for part in (p for e in g.episodes for p in e.parts):
            part.actor_id, part.actor_kind = "fp8-0", "fp8_emulated"
            part.logp_inf = part.logp_inf - 0.4 * np.arange(len(part.logp_inf), dtype=np.float32)
    strata = tuple(
        Stratum((kind,), {"tis": load_object(CORRECTIONS["tis"])()}) for kind in ("bf16", "fp8")
    )
    lists: dict[str, dict[str, Any]] = {"tis": {}}
    job = replace(make_job(model, corrections=lists), strata=strata)
    fleet = LearnerRank(job, make_place(rank, world, port))
    fleet.begin_phase([groups])
    mixed = untimed(fleet.train_step(0))
    probes = {}
    for kind, own in (("fp8", groups[::2]), ("bf16", groups[1::2])):
        alone = LearnerRank(make_job(model, corrections=lists), make_place(rank, world, port))
        alone.begin_phase([own])
        probes[kind] = untimed(alone.train_step(0))
    return mixed, probes
