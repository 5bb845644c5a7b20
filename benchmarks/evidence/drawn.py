"""Rollouts of a real engine under a deliberate mismatch, and both policies' log-probs over the
whole vocabulary: what `agreement.py` and `jackpot_normaliser.py` measure.

The engine samples as an actor of a run does and returns the log-probs of the whole vocabulary;
those of the policy come from transformers on the same tokens. Of the two distributions at every
token only what the tables need is kept (`compare`), so that a large vocabulary fits into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.corrections.dvp import DvpSpec
from rlcore.models.folder import read_config
from rlcore.models.specs import TemplateSpec
from rlcore.models.text import decode_response, encode_prompt, load_tokenizer
from rlcore.rollout.specs import ActorSpec, EngineJob
from rlcore.tasks.arithmetic import NUMBER, Arithmetic
from rlcore.testing.records import make_sampling
from rlcore.types import Grade, Item, Request, Trajectory

LOG_ZERO = -1e9
MAX_LEN = 256  # tokens of an episode
TOP = 40  # largest k that is kept
BATCH = 8  # responses that a teacher-forced pass takes together
RHO = DvpSpec().rho
#: what makes an actor differ from the policy, by name
ACTORS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    **{
        f"{rounding} {scales}": {"rounding": rounding, "scales": scales}
        for rounding in ("fp8", "int8", "int4")
        for scales in ("tensor", "channel", "block")
    },
    "logit noise 0.1": {"logit_noise": 0.1},
    "logit noise 0.5": {"logit_noise": 0.5},
    "temperature x1.1": {"temperature_scale": 1.1},
    "temperature x1.3": {"temperature_scale": 1.3},
}


class Sums(Arithmetic):
    """Sums asked in a sentence; the last number of the response is graded, with credit for right
    digits."""

    name = "sums"

    def __init__(self) -> None:
        question = "What is {a} {op} {b}? Answer in one sentence."
        super().__init__(ops="+-", max_digits=2, question=question, credit="digits")

    def grade(self, item: Item, response: str) -> Grade:
        numbers = NUMBER.findall(response)
        return super().grade(item, numbers[-1] if numbers else "")


def no_grade(item: Any, response: str) -> float:
    """The grader of a data file that supervised training alone reads: it is never asked."""
    raise RuntimeError("worked answers are not graded")


@dataclass(slots=True)
class Drawn:
    """B responses of at most T tokens under two policies, right-padded; K top entries of each."""

    mask: Tensor  # [B, T] bool
    ids: Tensor  # [B, T] int64, sampled
    logp_inf: Tensor  # [B, T] float32, of the sampled token
    logp_ref: Tensor  # [B, T]
    kl: Tensor  # [B, T], KL(p_inf || p_ref) over the whole vocabulary, nats
    z: Tensor  # [B, T], sum_x min(p_inf, p_ref/lam) over the whole vocabulary
    inf_ids: Tensor  # [B, T, K] int64
    inf_logp: Tensor  # [B, T, K]
    ref_ids: Tensor  # [B, T, K]
    ref_logp: Tensor  # [B, T, K]
    ref_at_inf: Tensor  # [B, T, K]: p_ref at the ids of `inf_ids`
    inside_inf: Tensor  # [B, T] bool: the sampled token lies in the actor's safe set
    inside_ref: Tensor  # [B, T] bool: in the learner's
    coverage_inf: Tensor  # [B, T]: mass of the actor's safe set under p_inf
    coverage_ref: Tensor  # [B, T]: mass of the learner's safe set under p_ref
    outside: Tensor  # [B, T]: mass that p_inf has outside the learner's safe set
    group_ids: Tensor  # [B] int64
    rewards: Tensor  # [B] float32


def compare(inf: Tensor, ref: Tensor, sampled: Tensor, lam: float = 1.0) -> dict[str, Tensor]:
    """The per-token fields of `Drawn` from log p_inf and log p_ref [S, V] and sampled ids [S]."""
    p_inf, p_ref = inf.exp(), ref.exp()
    k = min(TOP, inf.shape[-1])
    mine, own = inf.topk(k, dim=-1), ref.topk(k, dim=-1)
    at = sampled[:, None]
    safe_inf, safe_ref = (x >= x.amax(-1, keepdim=True) + np.log(RHO) for x in (inf, ref))
    return {
        "ids": sampled,
        "logp_inf": inf.gather(-1, at)[:, 0],
        "logp_ref": ref.gather(-1, at)[:, 0],
        # a token that the actor cannot draw adds nothing
        "kl": torch.where(p_inf > 0, p_inf * (inf - ref), 0.0).sum(-1),
        "z": torch.minimum(p_inf, p_ref / lam).sum(-1),
        "inf_ids": mine.indices,
        "inf_logp": mine.values,
        "ref_ids": own.indices,
        "ref_logp": own.values,
        "ref_at_inf": ref.gather(-1, mine.indices),
        "inside_inf": safe_inf.gather(-1, at)[:, 0],
        "inside_ref": safe_ref.gather(-1, at)[:, 0],
        "coverage_inf": (p_inf * safe_inf).sum(-1),
        "coverage_ref": (p_ref * safe_ref).sum(-1),
        "outside": (p_inf * ~safe_ref).sum(-1),
    }


def padded(
    rows: Sequence[dict[str, Tensor]], groups: Sequence[int], rewards: Sequence[float]
) -> Drawn:
    """One record of several responses: `rows` of `compare`, their group ids and rewards."""
    counts = torch.tensor([len(row["ids"]) for row in rows])
    pad = torch.nn.utils.rnn.pad_sequence
    values: dict[str, Tensor] = {
        name: pad([row[name] for row in rows], batch_first=True) for name in rows[0]
    }
    return Drawn(
        mask=torch.arange(int(counts.max())) < counts[:, None],
        group_ids=torch.tensor(groups),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        **values,
    )


def save(drawn: Drawn, path: Any) -> None:
    """Write a record to a file of tensors."""
    torch.save({f.name: getattr(drawn, f.name) for f in fields(drawn)}, path)


def load(path: Any) -> Drawn:
    """What `save` wrote."""
    return Drawn(**torch.load(path, weights_only=True))


class Prompts:
    """Prompts of a task through a model's own chat template, and the rewards of responses."""

    def __init__(self, model: str, task: Any) -> None:
        self.task = task
        self.tokenizer = load_tokenizer(model)

    def requests(self, group: int, samples: int, tokens: int, k: int) -> list[Request]:
        """The samples of training item `group`."""
        item = self.task.item("train", group)
        spec = make_sampling(max_new_tokens=tokens, logprobs_k=k)
        prompt = np.array(self.encoded(self.question(item)), np.int32)
        return [
            Request(group, i, item.prompt_id, prompt, spec, seed=samples * group + i)
            for i in range(samples)
        ]

    def question(self, item: Item) -> str:
        """What is asked."""
        return item.question

    def encoded(self, text: str) -> list[int]:
        """Token ids of a question in the model's chat format."""
        return encode_prompt(self.tokenizer, text, TemplateSpec())

    def reward(self, t: Trajectory) -> float:
        """The task's reward of a response."""
        text = decode_response(self.tokenizer, t.sampled_ids.tolist())
        return float(self.task.grade(self.task.item("train", t.group_id), text).reward)


def start(model: str, actor: ActorSpec, k: int, max_len: int = MAX_LEN) -> Any:
    """An engine as an actor of a run starts it; `k`: the most top log-probs of a request."""
    from rlcore.rollout.specs import start_engine

    longest = read_config(model).get("max_position_embeddings", max_len)
    return start_engine(EngineJob(actor, "bench-0", model, min(max_len, longest), logprobs_k=k))


def sample(engine: Any, requests: Sequence[Request]) -> list[Trajectory]:
    """The responses to some requests, in their order."""
    engine.add(requests)
    done: list[Trajectory] = []
    while engine.unfinished():
        done += engine.step()
    return sorted(done, key=lambda t: (t.group_id, t.sample_index))


def whole_vocabulary(t: Trajectory, vocab: int) -> Tensor:
    """log p_inf [S, V] of a response whose every log-prob was returned."""
    full = torch.full((len(t.logp_inf), vocab), LOG_ZERO)
    # -1: a token that the engine gave no probability
    ids = torch.from_numpy(t.topk_ids).long()
    logp = torch.from_numpy(t.topk_logp).float().where(ids >= 0, LOG_ZERO)
    return full.scatter_(1, ids.clamp_min(0), logp)


def policy_of(model: str) -> Any:
    """The learner's model, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def teacher_forced(policy: Any, done: Sequence[Trajectory]) -> Iterator[Tensor]:
    """log p [S, V] of every response, in order; neighbours go through the model together."""
    for start_ in range(0, len(done), BATCH):
        batch = done[start_ : start_ + BATCH]
        width = max(len(t.token_ids) for t in batch)
        rows = np.stack([np.pad(t.token_ids, (0, width - len(t.token_ids))) for t in batch])
        # causal attention: what pads on the right changes nothing before it
        with torch.no_grad():
            states = policy.base_model(torch.from_numpy(rows).long()).last_hidden_state
            for t, row in zip(batch, states):
                # logits of prompts are not needed, and of long ones too many
                logits = policy.lm_head(row[len(t.prompt_ids) - 1 : len(t.token_ids) - 1])
                yield logits.float().log_softmax(-1)


def collect(
    model: str,
    actor: ActorSpec,
    prompts: Prompts,
    policy: Any,
    *,
    shape: tuple[int, int, int],
    lam: float = 1.0,
) -> tuple[Drawn, list[Trajectory]]:
    """What an actor draws, compared with `policy`; and the records, with TOP log-probs.

    shape: groups, samples a group, most tokens of a response.
    """
    engine = start(model, actor, int(policy.config.vocab_size))
    found = draw(engine, range(shape[0]), prompts, policy, shape=shape[1:], lam=lam)
    engine.close()
    return found


def draw(
    engine: Any,
    groups: Sequence[int],
    prompts: Prompts,
    policy: Any,
    *,
    shape: tuple[int, int],
    lam: float = 1.0,
) -> tuple[Drawn, list[Trajectory]]:
    """`collect` with an engine that runs already; shape: samples a group, tokens of a response."""
    vocab = int(policy.config.vocab_size)
    # all at once: a decode step costs about the same for one sequence as for many
    done = sample(engine, [r for g in groups for r in prompts.requests(g, *shape, vocab)])
    rows = []
    for t, ref in zip(done, teacher_forced(policy, done)):
        rows.append(compare(whole_vocabulary(t, vocab), ref, sampled_ids(t), lam))
        t.topk_ids, t.topk_logp = t.topk_ids[:, :TOP].copy(), t.topk_logp[:, :TOP].copy()
    return of_records(rows, prompts, done), done


def against(old: Any, new: Any, prompts: Prompts, done: Sequence[Trajectory]) -> Drawn:
    """The same responses as of an actor with the weights of `old` and a learner that has `new`."""
    pairs = zip(done, teacher_forced(old, done), teacher_forced(new, done))
    rows = [compare(inf, ref, sampled_ids(t)) for t, inf, ref in pairs]
    return of_records(rows, prompts, done)


def of_records(
    rows: Sequence[dict[str, Tensor]], prompts: Prompts, done: Sequence[Trajectory]
) -> Drawn:
    return padded(rows, [t.group_id for t in done], [prompts.reward(t) for t in done])


def sampled_ids(t: Trajectory) -> Tensor:
    """[S] int64."""
    return torch.from_numpy(t.sampled_ids).long()
