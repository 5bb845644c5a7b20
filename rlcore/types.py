"""The data that flows through rlcore. Read this first, then `interfaces.py`.

    Item -> Request -> Trajectory -> Group -> (learner) StepTensors -> published weights, version v

Symbols in the shape comments: P prompt tokens, T response tokens, k stored top log-probs, B sequences of a batch.
Log-probs are natural logarithms. `p_inf` is the behaviour policy (what the actor really sampled from, after
temperature and truncation), `p_ref` the proximal policy (the learner as the batch entered its update phase), `p_new`
the policy being differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:  # the pure-Python rooms must not need torch
    import torch

ScoreStatus = Literal["pending", "ok", "error", "timeout"]
FinishReason = Literal["stop", "length", "abort"]
OnPublish = Literal["finish", "abort", "in_flight"]
# what a trajectory was sampled by; *_emulated: weights rounded to that format, arithmetic in the actor's dtype
ActorKind = Literal["bf16", "fp8", "fp8_emulated", "int8_emulated", "int4_emulated", "sparse", "draft"]


@dataclass(frozen=True, slots=True)
class Item:
    """One problem of a task: text only, rebuilt from (split, index) wherever it is needed."""

    prompt_id: str  # "<task>/<split>/<index>", unique and stable
    question: str  # what the model is asked, before any chat template
    answer: str  # the reference the grader compares with; may be ""
    meta: dict[str, Any] = field(default_factory=dict)  # JSON-able extras for the grader


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's verdict. Raising is how a grader says that it could not judge; 0.0 means wrong."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)  # e.g. {"correct": 1.0, "format": 0.5}


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How tokens are drawn. `logp_inf` is the log-prob under exactly this distribution."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()  # stop strings; the text is cut before them
    logprobs_k: int = 20  # top log-probs kept for every token; 0 keeps only the sampled one; -1 keeps none

    @property
    def full_support(self) -> bool:
        """True when no token of the vocabulary is cut off, so that ratios against `p_inf` are unbiased."""
        return self.top_p >= 1.0 and self.top_k == 0 and self.min_p == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw. Everything an actor needs; nothing about it depends on timing."""

    group_id: int  # admission number of its group; negative for evaluation
    sample_index: int  # 0..n-1 within the group
    prompt_id: str
    prompt_ids: np.ndarray  # [P] int32
    sampling: SamplingSpec
    seed: int  # derive_seed(run seed, "sample", prompt admission, sample_index)
    purpose: str = "train"  # "train" or "eval"

    @property
    def request_id(self) -> str:
        return f"{self.purpose}:{self.group_id}:{self.sample_index}"


@dataclass(slots=True)
class Trajectory:
    """One finished sample with everything the learner needs to correct for how it was drawn."""

    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [T] int32
    logp_inf: np.ndarray  # [T] float32, log p_inf of the sampled tokens
    topk_ids: np.ndarray  # [T, k] int32, most probable first; -1 where the engine had fewer
    topk_logp: np.ndarray  # [T, k] float32 (float16 on disk if asked); -inf where topk_ids is -1
    token_version: np.ndarray  # [T] int32, policy version that sampled each token, non-decreasing
    actor_id: str
    actor_kind: ActorKind
    group_id: int
    prompt_id: str
    sample_index: int
    finish_reason: FinishReason
    purpose: str = "train"
    score_status: ScoreStatus = "pending"
    reward: float | None = None  # None unless score_status == "ok"
    reward_parts: dict[str, float] = field(default_factory=dict)
    score_error: str = ""  # one line: what the grader raised, or the deadline it passed
    timings: dict[str, float] = field(default_factory=dict)  # seconds: "queue_s", "generate_s", "score_s"

    def __post_init__(self) -> None:
        t = len(self.response_ids)
        if not (len(self.logp_inf) == len(self.token_version) == len(self.topk_ids) == len(self.topk_logp) == t):
            raise ValueError(f"trajectory {self.request_id}: per-token arrays disagree on length {t}")
        if (self.score_status == "ok") != (self.reward is not None):
            raise ValueError(f"trajectory {self.request_id}: status {self.score_status!r} with reward {self.reward!r}")

    @property
    def request_id(self) -> str:
        return f"{self.purpose}:{self.group_id}:{self.sample_index}"

    def scored(
        self, status: ScoreStatus, grade: Grade | None = None, error: str = "", seconds: float = 0.0
    ) -> Trajectory:
        """The same trajectory with a verdict; a failed score has a status and no reward."""
        return replace(
            self,
            score_status=status,
            reward=None if grade is None else grade.reward,
            reward_parts={} if grade is None else dict(grade.parts),
            score_error=error,
            timings={**self.timings, "score_s": seconds},
        )


@dataclass(slots=True)
class Group:
    """All samples of one prompt under one admission: the unit of admission, sampling and training."""

    group_id: int
    prompt_id: str
    admitted_version: int  # published version when it was admitted: a lower bound of its tokens' versions
    trajectories: list[Trajectory]  # by sample_index; failed scores are left out by the buffer
    arrival_version: int = 0  # learner version when its last sample arrived: splits staleness in flight / in buffer

    @property
    def tokens(self) -> int:
        """Response tokens in the group."""
        return sum(len(t.response_ids) for t in self.trajectories)


@dataclass(slots=True)
class StepTensors:
    """What corrections and objectives see of one rank's share of a step. Right-padded, everything detached.

    Rows are sequences, columns response positions. Optional fields are None unless the pipeline asked for them;
    p_ref's top k is there wherever actors store theirs.
    """

    mask: torch.Tensor  # [B, T] bool, sampled response tokens
    logp_inf: torch.Tensor  # [B, T] float32
    logp_ref: torch.Tensor  # [B, T] float32
    logp_new: torch.Tensor  # [B, T] float32, equals logp_ref at the first step of an update phase
    rewards: torch.Tensor  # [B] float32
    group_ids: torch.Tensor  # [B] int64
    advantages: torch.Tensor  # [B, T] float32
    token_version: torch.Tensor  # [B, T] int32
    sample_ids: torch.Tensor  # [B] int64, unique and stable per sequence: seeds draws that must not depend on layout
    step: int  # optimizer step, turning version `step` into `step + 1`
    topk_ids_inf: torch.Tensor | None = None  # [B, T, k] int64, -1 padded
    topk_logp_inf: torch.Tensor | None = None  # [B, T, k] float32, -inf padded
    ref_topk_ids: torch.Tensor | None = None  # [B, T, k] int64: the learner's own top k
    ref_topk_logp: torch.Tensor | None = None  # [B, T, k] float32
    ref_logp_at_inf_ids: torch.Tensor | None = None  # [B, T, k] float32: p_ref on the actor's top-k ids
    new_topk_ids: torch.Tensor | None = None  # the same three under p_new
    new_topk_logp: torch.Tensor | None = None
    new_logp_at_inf_ids: torch.Tensor | None = None
    inside: torch.Tensor | None = None  # [B, T] bool: sampled token lies in the learner's safe set (DVP)
    coverage: torch.Tensor | None = None  # [B, T] float32: probability mass of the safe set (DVP)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One chunked pass over hidden states and LM head, per token position. N tokens, k top entries."""

    logp: torch.Tensor  # [N] float32, log-prob of the sampled token (constrained if a safe set is on)
    entropy: torch.Tensor  # [N] float32, nats
    topk_ids: torch.Tensor | None = None  # [N, k] int64
    topk_logp: torch.Tensor | None = None  # [N, k] float32
    logp_at_ids: torch.Tensor | None = None  # [N, k'] float32 at the ids asked for; 0-filled where the id was -1
    inside: torch.Tensor | None = None  # [N] bool
    coverage: torch.Tensor | None = None  # [N] float32


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What a publish promises: enough for an actor to prove that all of it arrived."""

    version: int
    names: tuple[str, ...]  # Hugging Face parameter names, tied weights once
    shapes: tuple[tuple[int, ...], ...]
    dtype: str  # "float32", "bfloat16": the dtype on the wire
    checksums: dict[str, int]  # name -> checksum of the tensor's bits, for all names or a seeded sample of them
    full: bool  # True when checksums covers every name (start, after a resume)
