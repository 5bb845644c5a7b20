"""How long the parts of a run take: measured, given in a file, or from `planner/gpus.py`."""

from __future__ import annotations

from rlcore.spec import Spec, setting


class ActorRates(Spec):
    """One engine of one kind, with any number of GPUs.

    A decode step of n requests takes `decode_s + n * decode_request_s + c * decode_context_s`,
    where c sums, over the requests, their context or `context_budget`, whichever is less.
    """

    decode_s: float = setting(0.02, "of a decode step, whatever is in it", unit="s", gt=0)
    decode_request_s: float = setting(0.0, "more for each request in it", unit="s", ge=0)
    decode_context_s: float = setting(0.0, "more for each token of context in it", unit="s", ge=0)
    context_budget: int | None = setting(
        None, "tokens that sparse attention reads of a context; null: all", unit="tokens", gt=0
    )
    prefill_tokens_per_s: float = setting(1e4, "of prompts and recomputed prefixes", gt=0)
    load_s: float = setting(0.5, "standing still for new weights", unit="s", gt=0)
    start_s: float = setting(60.0, "from its spawn to a ready engine", unit="s", ge=0)
    max_running: int = setting(256, "requests that fit together", gt=0)
    hand_over_s: float = setting(
        0.0, "between two messages of finished answers while there are more", unit="s", ge=0
    )

    def reads(self, context: float) -> float:
        """Tokens that a decode step reads of one context."""
        return context if self.context_budget is None else min(context, self.context_budget)

    def step_seconds(self, requests: int, read: float) -> float:
        """Seconds of a decode step of `requests` requests that reads `read` tokens of their
        contexts."""
        return self.decode_s + requests * self.decode_request_s + read * self.decode_context_s


class LearnerRates(Spec):
    """All ranks of the learner together. An optimizer step of t tokens takes
    `step_s + t * token_s`."""

    step_s: float = setting(0.1, "of an optimizer step, whatever is in it", unit="s", ge=0)
    token_s: float = setting(1e-4, "more for each token, prompts included", unit="s", ge=0)
    ref_token_s: float = setting(
        0.0, "of p_ref's pass, for each token, where it is its own pass", unit="s", ge=0
    )
    phase_token_s: float = setting(
        0.0,
        "of a critic's values and a teacher's scores before a phase, for each token, where they "
        "are not among the others",
        unit="s",
        ge=0,
    )
    fetch_token_s: float = setting(
        0.0, "reading a batch, for each token, prompts included", unit="s", ge=0
    )
    publish_s: float = setting(0.5, "gathering and sending the weights", unit="s", gt=0)


class LengthSpec(Spec):
    """Lengths of prompts and answers: log-normal, cut at rollout.max_new_tokens."""

    prompt: int = setting(128, "of every prompt", unit="tokens", gt=0)
    median: float = setting(512.0, "of answers", unit="tokens", gt=0)
    spread: float = setting(0.6, "standard deviation of the logarithm of answers' lengths", ge=0)


class EpisodeSpec(Spec):
    """Episodes of an environment. An episode takes one call before its first turn, one between two
    turns and two after the last; its engine decodes others meanwhile."""

    turns: float = setting(1.0, "of an episode, in the mean", ge=1)
    given: int = setting(64, "given after each turn but the last", unit="tokens", ge=0)
    call_s: float = setting(0.01, "of an environment: reset, step or grade", unit="s", ge=0)


class Rates(Spec):
    """Everything that a forecast needs besides a run's configuration.

    Example: Rates(actor=ActorRates(decode_s=0.02), learner=LearnerRates(token_s=1e-5))
    """

    actor: ActorRates = setting(default_factory=ActorRates, meaning="a rollout actor")
    learner: LearnerRates = setting(default_factory=LearnerRates, meaning="the learner")
    lengths: LengthSpec = setting(
        default_factory=LengthSpec, meaning="of prompts and answers; with episodes, of turns"
    )
    episodes: EpisodeSpec | None = setting(None, "of an environment; null: answers of one turn")
    grade_s: float = setting(
        1e-3, "time between two answers of all graders of a node", unit="s", gt=0
    )
    deliver_s: float = setting(
        0.0, "from a graded answer to the buffer, messages included", unit="s", ge=0
    )
    teacher_tokens_per_s: float | None = setting(
        None, "that one engine of a teacher scores, prompts included; null: there is none", gt=0
    )
    beside: str = setting("", "critic and teacher whose time is in these rates")
    failures_per_day: float = setting(0.0, "processes of one actor that die, a day", ge=0)

    @property
    def given(self) -> float:
        """Tokens of a mean sequence that nobody samples."""
        after = self.episodes.given * (self.episodes.turns - 1) if self.episodes else 0.0
        return self.lengths.prompt + after

    @property
    def context(self) -> float:
        """Tokens of a sequence whose turns have median length."""
        turns = self.episodes.turns if self.episodes else 1.0
        return self.given + turns * self.lengths.median
