"""The data that flows through rlcore. Read this first, then `interfaces.py`.

    Item -> Request -> Trajectory (+ Score) -> Group -> StepTensors -> published weights, version v

Three policies are kept apart, everywhere under these names:

    name here   the field's terms               what it is
    p_inf       behaviour policy                what the actor really sampled from: its own weights,
                                                after temperature and truncation
    p_ref       old or proximal policy          the learner's policy as the batch entered its update
                                                phase (not the field's "reference policy": that one
                                                is called frozen here)
    p_new       current policy                  the learner's policy now, being differentiated
    frozen      reference policy                the starting policy that a KL penalty is taken to

Symbols in the shape comments: L tokens of a record, S sampled tokens among them, k stored top
log-probs, B episodes of a batch. T is the most sampled tokens of any of them. Log-probs are natural
logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from rlcore.pickling import ByFields

if TYPE_CHECKING:  # packages in plain Python must not import torch
    import torch

POLICY = "policy"  # the policy's own weights, among the sets that are published
ScoreStatus = Literal["ok", "error", "timeout"]
MOST_REWARD = 1e12  # of a reward or one of its parts, either sign
FinishReason = Literal["stop", "length", "abort"]
OnPublish = Literal["finish", "abort", "in_flight"]
# Kinds with rounded weights, whose arithmetic is in the actor's dtype.
Emulated = Literal[
    "fp8_emulated",
    "int8_emulated",
    "int4_emulated",
    "int3_emulated",
    "mxfp4_emulated",
    "nvfp4_emulated",
]
# What a trajectory was sampled by.
ActorKind = Literal["bf16", "fp8", Emulated, "sparse", "draft"]

# {"role": ..., "content": text} and whatever else a chat template reads, in OpenAI's form
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One problem of a task: text only, rebuilt from (split, index) wherever it is needed.

    Example: Item("digits/train/17", "7302=", "0237")
    """

    prompt_id: str  # "<task>/<split>/<index>", unique and stable
    question: str  # what the model is asked, before any chat template
    answer: str  # the reference the grader compares with; may be ""
    meta: dict[str, Any] = field(default_factory=dict)  # JSON-able extras for the grader
    # What the model is asked, where that is more than `question`, which is then the last of them.
    messages: tuple[Message, ...] = ()

    def opening(self) -> list[Message]:
        """Return the question to the model, as the messages of a conversation."""
        return list(self.messages) or [{"role": "user", "content": self.question}]


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's verdict. A grader that cannot judge raises; 0.0 means wrong.

    Example: Grade(1.0, {"correct": 1.0, "format": 1.0})
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)  # e.g. {"correct": 1.0, "format": 0.5}
    turn_rewards: tuple[float, ...] = ()  # besides `reward`; environments alone may give them
    token_rewards: tuple[float, ...] = ()  # besides `reward`, one a sampled token
    answer: str = ""  # the answer that was judged, equal ones in one spelling: a majority's vote


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How tokens are drawn. `logp_inf` is the log-prob under exactly this distribution.

    Example: SamplingSpec(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=64,
    stop=(), logprobs_k=20)
    """

    temperature: float  # 0 is greedy
    top_p: float  # 1: off
    top_k: int  # 0: off
    min_p: float  # 0: off
    max_new_tokens: int
    stop: tuple[str, ...]  # stop strings; the text is cut before them
    logprobs_k: int  # top log-probs kept for every token; 0: the sampled one only; -1: none

    @property
    def truncates(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


# of a record's extras: [m, 2] int32, versions that sampled it and how many decoder layers of its
# actor were precise then, where a set-point moves them
PRECISE_LAYERS = "precise_layers"
# of a record's extras, where a teacher's engine has scored it: its likeliest tokens [S, k] int32,
# -1 where it has fewer; their log-probs [S, k] float32; those of the sampled tokens [S] float32
TEACHER = ("teacher_ids", "teacher_logp_at", "teacher_logp")
TEACHER_S = "teacher_s"  # of a record's timings: seconds of that engine, its share of a call's
PAGE_RULE = "page_rule"  # of a record's extras: [2 + n] int32, `PageRule` in order


class PageRule(NamedTuple):
    """The pages that sparse attention keeps by position, of one request and its record.

    Example, 4 pages up to position 1023 and 8 from there on: PageRule(3, 1024, (4, 8))
    """

    version: int  # of the actors' rule in this run: a set-point moves it
    length_step: int  # positions that share an entry of `blocks`
    blocks: tuple[int, ...]  # [n], never falling; the last holds from its first position on

    def array(self) -> np.ndarray:
        """[2 + n] int32, as a record carries it."""
        return np.array([self.version, self.length_step, *self.blocks], np.int32)

    @classmethod
    def of_record(cls, extras: Mapping[str, np.ndarray]) -> PageRule | None:
        """The rule that sampled a record; None: its actor's configuration has it."""
        found = extras.get(PAGE_RULE)
        if found is None:
            return None
        version, length_step, *blocks = found.tolist()
        return cls(version, length_step, tuple(blocks))


@dataclass(frozen=True, slots=True)
class Request(ByFields):
    """One sample to draw. Everything an actor needs; nothing about it depends on timing.

    Example: Request(17, 0, "digits/train/17", np.array([3, 4, 5], np.int32), sampling, seed=1)
    """

    group_id: int  # admission number of its group; negative for evaluation
    sample_index: int  # 0..n-1 within the group
    prompt_id: str
    prompt_ids: np.ndarray  # [P] int32; empty where the actor makes them
    sampling: SamplingSpec
    seed: int  # derive_seed(run seed, "sample", group_id, sample_index)
    purpose: str = "train"  # "train", or "eval/<version>/<task>/<mode>"
    asked: str | tuple[Message, ...] | None = None  # text that the actor makes `prompt_ids` of
    page_rule: PageRule | None = None  # of a sparse actor; None: that of its configuration

    @property
    def request_id(self) -> str:
        return request_id(self.purpose, self.group_id, self.sample_index)


def request_id(purpose: str, group_id: int, sample_index: int) -> str:
    """The name of one sample, unique among all that are unfinished."""
    return f"{purpose}:{group_id}:{sample_index}"


TURN = "#"  # in the purpose of what the engine is asked for: a turn of an episode


def is_turn(name: str) -> bool:
    """Return whether a purpose, or the id of a request, is of one turn of an episode."""
    return TURN in name


def actor_label(name: str) -> str:
    """The label, `actor.LABEL`, of an actor ("fp8-0") or of one of its drawings ("fp8-0:71:3")."""
    actor = name.partition(":")[0]
    return actor.rpartition("-")[0] or actor


def at_kind(metrics: Mapping[str, float], label: str) -> dict[str, float]:
    """Metrics of the samples of one kind of actors: "mismatch/ess" becomes "mismatch/ess@fp8"."""
    return {f"{name}@{label}": value for name, value in metrics.items()}


@dataclass(slots=True)
class Trajectory:
    """One record of an episode: everything the learner needs to correct for the sampling policy.

    A prompt is the first observation, a tool's answer a later one. Only sampled tokens have
    log-probs, enter the loss and are counted. An episode is usually one record; where a chat
    template rewrites what came before, it goes on in a further part.

    Example, one turn, a prompt of two tokens and a response of three, k = 1:
        token_ids      [5, 9, 4, 7, 1]
        sampled        [0, 0, 1, 1, 1]
        logp_inf       [-0.1, -0.7, -0.2]
        topk_ids       [[4], [6], [1]]
        topk_logp      [[-0.1], [-0.6], [-0.2]]
        token_version  [3, 3, 4]              weights changed while it was sampled
        turn_starts    [2]
    """

    token_ids: np.ndarray  # [L] int32, observations and sampled tokens in order
    sampled: np.ndarray  # [L] bool, True where the model drew the token; False at index 0
    logp_inf: np.ndarray  # [S] float32, log p_inf of the sampled tokens, in order
    topk_ids: np.ndarray  # [S, k] int32, most probable first; -1 where the engine had fewer
    topk_logp: np.ndarray  # [S, k] float32 (float16 on disk if asked); -inf where topk_ids is -1
    token_version: np.ndarray  # [S] int32, policy version that sampled each token, non-decreasing
    turn_starts: np.ndarray  # [turns] int32, index into token_ids at which each model turn begins
    actor_id: str
    actor_kind: ActorKind
    group_id: int
    prompt_id: str
    sample_index: int  # of the episode within its group
    finish_reason: FinishReason  # of the last turn
    draw_id: str  # names this drawing of the sample: after a loss it is drawn again
    part: int = 0  # which record of its episode this is, from 0
    parts: int = 1  # records of the episode
    purpose: str = "train"
    timings: dict[str, float] = field(default_factory=dict)  # seconds: "queue_s", "generate_s"
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # further arrays by name

    def __post_init__(self) -> None:
        name, count = self.request_id, int(np.count_nonzero(self.sampled))
        if len(self.token_ids) != len(self.sampled):
            raise ValueError(
                f"trajectory {name}: {len(self.token_ids)} tokens and a mask of {len(self.sampled)}"
            )
        per_token = (self.logp_inf, self.token_version, self.topk_ids, self.topk_logp)
        if any(len(values) != count for values in per_token):
            raise ValueError(
                f"trajectory {name}: per-token arrays disagree on {count} sampled tokens"
            )
        if not len(self.token_ids) or self.sampled[0]:
            raise ValueError(
                f"trajectory {name}: its first token is not an observation, so nothing predicts it"
            )
        if not 0 <= self.part < self.parts:
            raise ValueError(f"trajectory {name}: part {self.part} of {self.parts}")

    @property
    def request_id(self) -> str:
        return request_id(self.purpose, self.group_id, self.sample_index)

    @property
    def prompt_ids(self) -> np.ndarray:
        """[P] int32: the first observation."""
        return self.token_ids[: int(self.turn_starts[0])]

    @property
    def sampled_ids(self) -> np.ndarray:
        """[S] int32: the tokens that the model drew, over all turns."""
        return self.token_ids[self.sampled]


@dataclass(frozen=True, slots=True)
class Score(ByFields):
    """A grader's verdict on one episode; the buffer joins it with the episode's records.

    A failed score has a status and no reward; it is never read as 0.

    Examples: Score(17, 0, "bf16-0:4", "ok", 1.0, {"correct": 1.0}),
    Score(17, 2, "bf16-0:6", "ok", 0.5, turn_rewards=(-0.5, 1.0)),
    Score(17, 1, "bf16-0:5", "timeout", error="the grader passed its deadline of 10 s")
    """

    group_id: int
    sample_index: int
    draw_id: str  # of the records it belongs to
    status: ScoreStatus
    reward: float | None = None  # None unless status == "ok"
    parts: dict[str, float] = field(default_factory=dict)
    # one a turn, `reward` is their sum; (): none was given, and all belongs to the last turn
    turn_rewards: tuple[float, ...] = ()
    # one a sampled token, over all turns; `reward` is their sum and `turn_rewards` theirs by turn
    token_rewards: tuple[float, ...] = ()
    error: str = ""  # one line: what the grader raised, or the deadline it passed
    seconds: float = 0.0  # the grading took
    answer: str = ""  # of an evaluation: as that of `Grade`

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.reward is not None):
            raise ValueError(
                f"score of sample {self.sample_index} of group {self.group_id}: status "
                f"{self.status!r} with reward {self.reward!r}"
            )

    def checked(self) -> Score:
        """This score, or a failed one where the status is unknown or a number cannot be trained on.
        Such a number is not finite, or beyond MOST_REWARD, whose square still fits a sum in
        float32."""
        ids = self.group_id, self.sample_index, self.draw_id
        if self.status not in get_args(ScoreStatus):
            return Score(*ids, "error", error=f"the status is {self.status!r:.80}")
        numbers: dict[str, Any] = {} if self.reward is None else {"reward": self.reward}
        numbers |= {f"part {name}": part for name, part in self.parts.items()}
        numbers |= {f"reward of turn {i}": r for i, r in enumerate(self.turn_rewards)}
        numbers |= {f"reward of token {i}": r for i, r in enumerate(self.token_rewards)}
        for what, number in numbers.items():
            if not isinstance(number, int | float) or not abs(number) <= MOST_REWARD:
                shown = f"{number:g}" if isinstance(number, float) else type(number).__name__
                error = f"the {what} is {shown}, not a number up to {MOST_REWARD:g}"
                return Score(*ids, "error", error=error, seconds=self.seconds)
        return self


@dataclass(frozen=True, slots=True)
class Answer(ByFields):
    """A grader's input from an episode: the model's text and its identifiers. No arrays.

    Example: Answer(17, 0, "bf16-0:4", "digits/train/17", "0237", tokens=5, versions=(3, 4))
    """

    group_id: int
    sample_index: int
    draw_id: str  # of the records it belongs to
    prompt_id: str
    text: str  # of the sampled tokens, cut before the first stop string
    tokens: int  # sampled tokens
    versions: tuple[int, int] | None = None  # oldest and newest among them; None without tokens
    finish_reason: FinishReason = "stop"
    purpose: str = "train"
    prompt: str = ""  # evaluation: the prompt's text, for display
    pieces: tuple[str, ...] = ()  # text of each sampled token, for a grader that asks for them

    @property
    def request_id(self) -> str:
        return request_id(self.purpose, self.group_id, self.sample_index)


@dataclass(frozen=True, slots=True)
class Played:
    """An episode in an environment that is over: its records, one a part, and its score.

    Example: Played([trajectory], answer, Score(17, 0, "bf16-0:4", "ok", 1.0))
    """

    parts: list[Trajectory]
    answer: Answer
    score: Score


@dataclass(slots=True)
class Episode:
    """All records of one sample, and its score. The unit of group sizes and advantages.

    Example: Episode([trajectory], Score(17, 0, "bf16-0:4", "ok", 1.0))
    """

    parts: list[Trajectory]  # in order; usually one
    score: Score

    @property
    def sample_index(self) -> int:
        return self.score.sample_index

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(t.logp_inf) for t in self.parts)


@dataclass(slots=True)
class Group:
    """All episodes of one prompt under one admission: the unit of admission and training.

    Example: Group(17, "digits/train/17", admitted_version=3, episodes=[...], arrival_version=4)
    """

    group_id: int
    prompt_id: str
    admitted_version: int  # published version at admission: a lower bound of its tokens' versions
    episodes: list[Episode]  # by sample_index; failed scores are left out by the buffer
    arrival_version: int = 0  # learner version as its last sample arrived: splits staleness

    @property
    def tokens(self) -> int:
        """Sampled tokens in the group."""
        return sum(e.tokens for e in self.episodes)


@dataclass(slots=True)
class StepTensors:
    """One rank's share of a step, as corrections and objectives see it. Right-padded, detached.

    Rows are episodes, columns their sampled tokens, over all turns and parts in order; an
    observation has no column. Optional fields are None unless the pipeline asked for them; p_ref's
    top k is there wherever actors store theirs.
    """

    mask: torch.Tensor  # [B, T] bool, sampled response tokens
    logp_inf: torch.Tensor  # [B, T] float32
    logp_ref: torch.Tensor  # [B, T] float32
    logp_new: torch.Tensor  # [B, T] float32, equals logp_ref at the first step of an update phase
    rewards: torch.Tensor  # [B] float64
    group_ids: torch.Tensor  # [B] int64
    advantages: torch.Tensor  # [B, T] float32
    token_version: torch.Tensor  # [B, T] int32
    # [B] int64, unique and stable per sequence: seeds draws that must not depend on layout
    sample_ids: torch.Tensor
    step: int  # optimizer step, turning version `step` into `step + 1`
    ref_version: int | None = None  # of p_ref, that of the phase's first step; None: `step`
    topk_ids_inf: torch.Tensor | None = None  # [B, T, k] int64, -1 padded
    topk_logp_inf: torch.Tensor | None = None  # [B, T, k] float32, -inf padded
    ref_topk_ids: torch.Tensor | None = None  # [B, T, k] int64: the learner's own top k
    ref_topk_logp: torch.Tensor | None = None  # [B, T, k] float32
    ref_logp_at_inf_ids: torch.Tensor | None = (
        None  # [B, T, k] float32: p_ref on the actor's top-k ids
    )
    new_topk_ids: torch.Tensor | None = None  # as the three fields above, under p_new
    new_topk_logp: torch.Tensor | None = None
    new_logp_at_inf_ids: torch.Tensor | None = None
    # [B, T] bool: sampled token lies in the safe set of p_ref, and in that of p_new (DVP)
    ref_inside: torch.Tensor | None = None
    new_inside: torch.Tensor | None = None
    coverage: torch.Tensor | None = None  # [B, T] float32: probability mass of p_ref's (DVP)
    # [B] bool: the episode's last turn was cut off at the length limit; None: none was
    truncated: torch.Tensor | None = None
    # [B] int64: the kind of actor that sampled each sequence, counted as the learner lists them;
    # None: all are of one
    kinds: torch.Tensor | None = None
    # [B, T] int64: the entry of its page rule that each token was sampled by, -1 for none; None:
    # no actor has pages by position
    stretch: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None  # [B, T] int64, the sampled tokens; 0 where there is none
    # [B, T] int64: a number that tokens of a group share whose kind of actor, page rule, versions
    # and ids are equal from the first of their record on; None: the model reads in another order
    repeats: torch.Tensor | None = None
    # [B, T, 32] float32: of the gradient of the output layer under p_ref, and under p_new
    # (`corrections.break_even`)
    sketch: torch.Tensor | None = None
    new_sketch: torch.Tensor | None = None

    def rows(self, chosen: torch.Tensor) -> StepTensors:
        """The same tensors for some of the sequences: their numbers [b], or a mask [B] bool."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return StepTensors(
            **{n: v[chosen] if hasattr(v, "shape") else v for n, v in values.items()}
        )


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One chunked pass over hidden states and LM head: N token positions, k top entries."""

    # [N] float32, log-prob of the sampled token (constrained if a safe set is on)
    logp: torch.Tensor
    entropy: torch.Tensor  # [N] float32, nats
    topk_ids: torch.Tensor | None = None  # [N, k] int64
    topk_logp: torch.Tensor | None = None  # [N, k] float32
    logp_at_ids: torch.Tensor | None = (
        None  # [N, k'] float32 at the ids asked for; 0-filled where the id was -1
    )
    inside: torch.Tensor | None = None  # [N] bool
    coverage: torch.Tensor | None = None  # [N] float32
    sketch: torch.Tensor | None = None  # [N, 32] float32, of the gradient of the output layer


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """The contents of a publication, so that an actor can verify that all of it arrived."""

    version: int
    names: tuple[str, ...]  # Hugging Face parameter names, tied weights once
    shapes: tuple[tuple[int, ...], ...]
    dtype: str  # "float32", "bfloat16": the dtype on the wire
    checksums: dict[str, int]  # name -> checksum of its bits, of all names or a seeded sample
    full: bool  # True when checksums covers every name (start, after a resume)
    # decoder layers that the actor keeps precise from now on, by its set-point; None: as before
    precise_layers: int | None = None
