"""Every metric of a run: unit, meaning, and how the values of several steps become one.

Angle brackets stand for the rest of one segment, so `eval/<task>/mean@<k>` covers
`eval/digits/mean@4`. Units and reductions are declared here, never inferred from a name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric. `reduction` combines the values of several steps (a summary, a thinned
    curve).

    Example: Metric("time/publish_s", "s", "publishing weights", "sum")
    """

    name: str
    unit: str
    meaning: str
    reduction: Reduction = "mean"

    def covers(self, name: str) -> bool:
        """Return whether this declaration is about `name`, segment by segment."""
        mine, theirs = self.name.split("/"), name.split("/")
        return len(mine) == len(theirs) and all(_covers(m, t) for m, t in zip(mine, theirs))


def _covers(template: str, segment: str) -> bool:
    literal, bracket, _ = template.partition("<")
    return (
        segment.startswith(literal) and len(segment) > len(literal)
        if bracket
        else segment == template
    )


METRICS: tuple[Metric, ...] = (
    Metric("step", "steps", "optimizer steps done", "last"),
    Metric("policy_version", "steps", "version of the learner's weights after this step", "last"),
    Metric("reward/mean", "reward", "mean reward of the batch's scored samples, before selection"),
    Metric("reward/std", "reward", "standard deviation of the same rewards"),
    Metric("reward/selected_mean", "reward", "mean reward of the samples that selection kept"),
    Metric(
        "reward_parts/<part>", "reward", "mean of one part of the reward, as the grader names it"
    ),
    Metric(
        "eval/policy_version",
        "steps",
        "oldest version that sampled a token of this row's evaluation",
        "last",
    ),
    Metric(
        "eval/version_span",
        "steps",
        "newest version that sampled a token of it, minus the oldest",
        "last",
    ),
    Metric("eval/<task>/greedy", "share", "held-out accuracy of the greedy answers", "last"),
    Metric(
        "eval/<task>/mean@<k>", "share", "held-out accuracy, mean over k sampled answers", "last"
    ),
    Metric(
        "eval/<task>/pass@<k>",
        "share",
        "held-out prompts with a correct answer among k sampled",
        "last",
    ),
    Metric("eval/<task>/greedy_reward", "reward", "held-out reward of the greedy answers", "last"),
    Metric(
        "eval/<task>/sampled_reward", "reward", "held-out reward of the sampled answers", "last"
    ),
    Metric("eval/<task>/greedy_length", "tokens", "length of the greedy answers", "last"),
    Metric("eval/<task>/sampled_length", "tokens", "length of the sampled answers", "last"),
    Metric(
        "eval/<task>/greedy_failed_scores",
        "samples",
        "greedy answers whose grader failed, or passed its deadline and so are wrong",
        "last",
    ),
    Metric(
        "eval/<task>/sampled_failed_scores",
        "samples",
        "sampled answers whose grader failed, or passed its deadline and so are wrong",
        "last",
    ),
    Metric(
        "eval/<task>/greedy_failed_share",
        "share",
        "greedy answers that the accuracy leaves out, since their grader failed",
        "last",
    ),
    Metric(
        "eval/<task>/sampled_failed_share",
        "share",
        "sampled answers that the accuracy leaves out, since their grader failed",
        "last",
    ),
    Metric("eval/<task>/<metric>", "1", "a further held-out result of a task", "last"),
    Metric("task/<task>/groups", "groups", "groups of a training task in the batch"),
    Metric("task/<task>/token_share", "share", "a task's share of the tokens trained on"),
    Metric("task/<task>/reward_mean", "reward", "reward/mean of a task's groups"),
    Metric("task/<task>/reward_std", "reward", "reward/std of a task's groups"),
    Metric("task/<task>/reward_selected_mean", "reward", "reward/selected_mean of a task's groups"),
    Metric("task/<task>/reward_parts/<part>", "reward", "reward_parts/<part> of a task's groups"),
    Metric("task/<task>/response_length_mean", "tokens", "mean response length of a task"),
    Metric("task/<task>/response_length_max", "tokens", "longest response of a task", "max"),
    Metric("task/<task>/truncated_share", "share", "a task's responses cut off at their limit"),
    Metric("task/<task>/consumed", "groups", "of a task, trained on since the start", "last"),
    Metric("task/<task>/filtered", "groups", "of a task, filtered by dynamic sampling", "last"),
    Metric("task/<task>/dropped", "groups", "of a task, failed or evicted as stale", "last"),
    Metric("task/<task>/seen", "problems", "whose pass rate is remembered (difficulty)", "last"),
    Metric("task/<task>/solved", "problems", "remembered as solved: drawn less", "last"),
    Metric("task/<task>/hopeless", "problems", "remembered as hopeless: drawn less", "last"),
    Metric("task/<task>/<count>", "1", "a further figure of a training task", "last"),
    Metric("response_length/mean", "tokens", "mean response length of the batch"),
    Metric("response_length/max", "tokens", "longest response of the batch", "max"),
    Metric(
        "response_length/truncated_share", "share", "responses cut off at rollout.max_new_tokens"
    ),
    Metric(
        "train/single_turn_share",
        "share",
        "turns that no other sample of their group reached: nothing to compare (turn_share)",
    ),
    Metric("staleness/mean", "steps", "mean over trained tokens of v - version(token)"),
    Metric("staleness/max", "steps", "maximum over trained tokens of v - version(token)", "max"),
    Metric(
        "staleness/in_flight_mean",
        "steps",
        "part of staleness/mean that arose before the group arrived",
    ),
    Metric(
        "staleness/in_buffer_mean",
        "steps",
        "part of staleness/mean that arose while the group waited in the buffer",
    ),
    Metric(
        "staleness/share_<age>",
        "share",
        "trained tokens of this age, up to the age of the next share",
    ),
    Metric("mismatch/kl_k1", "nats", "KL(p_inf || p_ref) by k1, tokens before rejection"),
    Metric("mismatch/kl_k3", "nats", "KL(p_inf || p_ref) by k3, tokens before rejection"),
    Metric("mismatch/abs_dlogp_mean", "nats", "mean |log p_ref - log p_inf|"),
    Metric("mismatch/abs_dlogp_max", "nats", "maximum |log p_ref - log p_inf|", "max"),
    Metric("mismatch/abs_dprob_mean", "probability", "mean |p_ref - p_inf| of the sampled tokens"),
    Metric(
        "mismatch/ess",
        "share",
        "effective sample size of the ratios p_ref/p_inf over the number of tokens",
    ),
    Metric("mismatch/ratio_cv", "1", "coefficient of variation of the ratios p_ref/p_inf"),
    Metric(
        "mismatch/acceptance",
        "share",
        "mean of min(1, p_ref/p_inf): tokens that OBRS would keep at lambda 1",
    ),
    Metric("mismatch/truncated_share", "share", "tokens with p_ref/p_inf above 2"),
    Metric("mismatch/masked_share", "share", "tokens with p_ref/p_inf outside [0.5, 2]"),
    Metric("mismatch/veto_share", "share", "sequences with a token of p_ref/p_inf below 1e-4"),
    Metric(
        "mismatch/nonfinite_share",
        "share",
        "tokens without a usable log-prob, excluded from the other statistics",
    ),
    Metric("mismatch/outside_share", "share", "tokens outside the learner's safe set (DVP)"),
    Metric(
        "mismatch/unlikely_share",
        "share",
        "tokens with p_ref below e^-13 of the learner's largest: outside DVP's default safe set",
    ),
    Metric("mismatch/coverage_mean", "probability", "mass of the learner's safe set (DVP)"),
    Metric("mismatch/z_approx", "probability", "OBRS normaliser on the stored top k, lambda 1"),
    Metric("mismatch/kappa", "1", "bias correction of z_approx"),
    Metric(
        "mismatch/unknown_share",
        "share",
        "top-k entries of the learner that the actor did not return",
    ),
    Metric("mismatch/routes_differ", "share", "token-layer pairs with other experts than p_new's"),
    Metric("mismatch/ais_alpha", "1", "AIS: weight of the correction, 0 off to 1 full"),
    Metric(
        "mismatch/ais_alpha_<signal>",
        "1",
        "AIS: one of the three signals that alpha combines",
    ),
    Metric("mismatch/<statistic>", "1", "a further statistic of p_ref against p_inf"),
    Metric(
        "correction/kept_share", "share", "tokens that all corrections together keep in the loss"
    ),
    Metric("correction/weight_mean", "1", "mean weight of the tokens kept in the loss"),
    Metric("correction/zero_weight_share", "share", "tokens kept in the loss with weight 0"),
    Metric("correction/<name>/<statistic>", "1", "a statistic of one correction"),
    Metric("loss/policy", "1", "policy loss"),
    Metric("loss/kl", "nats", "KL to the frozen starting policy, unscaled"),
    Metric("loss/<part>", "1", "a further part of the loss"),
    Metric("grad_norm", "1", "norm of the gradient before clipping"),
    Metric("entropy", "nats", "mean entropy of the policy over trained tokens"),
    Metric("lr", "1", "learning rate of this step, a correction's step scale included", "last"),
    Metric("policy/<statistic>", "1", "PPO ratio p_new/p_ref and its clipped shares"),
    Metric(
        "train/overlong_filtered",
        "sequences",
        "left out of the loss because the length limit cut them off (algorithm.overlong_filter)",
        "sum",
    ),
    Metric(
        "train/positions",
        "positions",
        "that one pass over the batch computes, padding included; common prefixes once where they "
        "are shared (learner.share_prefix)",
        "sum",
    ),
    Metric(
        "train/sequence_positions",
        "positions",
        "of the batch's sequences one by one, without padding",
        "sum",
    ),
    Metric("train/<statistic>", "1", "size and shape of the training batch"),
    Metric("estimate/<statistic>", "nats²", "variance of masked diffusion's log-probs by mask"),
    Metric("loss/sparse_policy", "1", "policy loss of the sparse copy (DistillSparse)"),
    Metric(
        "loss/distill_kl",
        "nats",
        "KL of the sparse copy to the dense policy on the actors' samples, unscaled",
    ),
    Metric("distill/<statistic>", "1", "the step of the sparse copy (DistillSparse)"),
    Metric("draft/<statistic>", "1", "the step of the co-trained draft"),
    Metric("time/step_s", "s", "from the previous row to this one", "sum"),
    Metric("time/wait_data_s", "s", "learner waiting for a batch", "sum"),
    Metric(
        "time/rollout_s",
        "s",
        "engines decoding since the previous row, mean over actors, from their latest heartbeats",
        "sum",
    ),
    Metric("time/learn_s", "s", "learner computing: p_ref, forward, backward, optimizer", "sum"),
    Metric("time/publish_s", "s", "learner and actors busy publishing weights", "sum"),
    Metric(
        "publish/sent_mib", "MiB", "weights sent to an actor that had the version before", "sum"
    ),
    Metric("publish/changed_share", "1", "of the published entries, those sent as changed", "last"),
    Metric("time/asleep_s", "s", "engines asleep while the learner trained (colocated)", "sum"),
    Metric("time/sleep_s", "s", "the slowest engine freeing its memory", "sum"),
    Metric("time/wake_s", "s", "the slowest engine taking it back", "sum"),
    Metric("time/learner_release_s", "s", "the slowest rank freeing memory for engines", "sum"),
    Metric("time/learner_reclaim_s", "s", "the slowest rank taking its memory back", "sum"),
    Metric("colocated/engine_freed_gib", "GiB", "freed by an engine that fell asleep", "last"),
    Metric("colocated/learner_freed_gib", "GiB", "freed by a learner rank for engines", "last"),
    Metric(
        "colocated/learner_peak_gib", "GiB", "most that torch had on a rank's GPU in a phase", "max"
    ),
    Metric("time/checkpoint_s", "s", "training standing still for a checkpoint", "sum"),
    Metric(
        "time/eval_s",
        "s",
        "from the start of an evaluation to its last verdict, in parallel with training",
        "sum",
    ),
    Metric("time/total_s", "s", "training time since step 0, over all sessions", "last"),
    Metric("time/<part>", "s", "a further part of a step", "sum"),
    Metric(
        "throughput/rollout_tokens_per_s",
        "tokens/s",
        "sampled tokens that arrived per second of wall time",
    ),
    Metric(
        "throughput/train_tokens_per_s", "tokens/s", "trained tokens per second of learner time"
    ),
    Metric("throughput/<statistic>", "1/s", "a further rate"),
    Metric(
        "engine/<label>/step_s",
        "s",
        "an engine step costs these actors, whatever is in it: non-negative least squares over all "
        "steps since their start, their handling of requests and answers included",
        "last",
    ),
    Metric("engine/<label>/request_s", "s", "more for each request in the step", "last"),
    Metric("engine/<label>/context_s", "s", "more for each token of their contexts", "last"),
    Metric("engine/<label>/prompt_s", "s", "more for each token of prompts that are new", "last"),
    Metric("buffer/groups", "groups", "finished groups waiting in the buffer", "last"),
    Metric("buffer/<count>", "1", "a count of the buffer", "last"),
    Metric(
        "ledger/<count>",
        "groups",
        "groups since the start of the run by outcome; the sums always match",
        "last",
    ),
    Metric("ledger/<outcome>/<reason>", "groups", "groups of an outcome by reason", "last"),
    Metric("checkpoint/step", "steps", "steps of the newest checkpoint on disk", "last"),
    Metric(
        "checkpoint/failed",
        "checkpoints",
        "checkpoints that could not be written, since the run was started or resumed",
        "last",
    ),
    Metric(
        "checkpoint/interval_s",
        "s",
        "time between checkpoints by checkpoint.every_s; 0: off",
        "last",
    ),
    Metric(
        "rollout/migrated_requests",
        "requests",
        "that passed rollout.request_timeout_s and were moved to another actor with their tokens",
        "last",
    ),
    Metric("rollout/<statistic>", "1", "the fleet of rollout actors", "last"),
    Metric(
        "metrics/nonfinite",
        "values",
        "values of this row that were NaN or infinite and are written as null",
        "sum",
    ),
)
# Looked up for every value of every row, and a family is matched segment by segment.
_EXACT = {m.name: m for m in METRICS if "<" not in m.name}
_FAMILIES = tuple(m for m in METRICS if "<" in m.name)


def declared(name: str) -> Metric | None:
    """The declaration of a name, its own before a family's; None if it has none."""
    return _EXACT.get(name) or next((m for m in _FAMILIES if m.covers(name)), None)


def is_accuracy(name: str) -> bool:
    """Return whether a metric is a held-out accuracy."""
    metric = declared(name)
    held_out = metric is not None and metric.name.startswith("eval/") and metric.unit == "share"
    return held_out and not name.endswith("_failed_share")


def combine(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Several steps as one row, each name by its declared reduction, ignoring missing and null
    values.

    Raises ValueError for an undeclared name.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(n for row in rows for n in row):
        values = [v for row in rows if (v := row.get(name)) is not None]
        metric = declared(name)
        if metric is None:
            raise ValueError(f"metric {name!r} is not declared in rlcore.metrics.names")
        if values:
            combined[name] = _reduce(metric.reduction, values)
    return combined


def _reduce(how: Reduction, values: Sequence[float]) -> float:
    match how:
        case "mean":
            return math.fsum(values) / len(values)
        case "sum":
            return math.fsum(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]


# What is healthy in a metric, and what to do when it leaves that range: for docs/metrics.md.
#
# By the names of `names.py`. A metric without an entry describes a run and has no range of its own.


class Guide(NamedTuple):
    """Example: Guide("above 0.8", "lower `schedule.max_staleness`")"""

    healthy: str
    otherwise: str


CORRECTION = "see the page of the correction under [Corrections](corrections/index.md)"
SAME = "of actor and learner: [KL rises](troubleshooting.md#kl-rises)"
ESS = "[ESS falls](troubleshooting.md#ess-falls)"
FLAT = "[The reward is flat](troubleshooting.md#the-reward-is-flat)"
LOWER = "[Evaluation is below]"
EVALUATION = f"{LOWER}(troubleshooting.md#evaluation-is-below-the-training-reward)"
LEARNER_WAITS = "[The learner waits](troubleshooting.md#the-learner-waits)"
ENGINES_WAIT = "[The engines wait](troubleshooting.md#the-engines-wait)"
GRADER = "the log has the last reason; `task.grade_timeout_s`, `task.grader_memory_mib`"
CUT = "raise `rollout.max_new_tokens`, or accept that such answers count as wrong"
NEVER_BINDS = "[The clip never binds](troubleshooting.md#the-clip-never-binds)"
GUIDES: dict[str, Guide] = {
    "reward/mean": Guide("rises", FLAT),
    "reward/std": Guide("above 0", f"at 0 no group teaches anything: {FLAT}"),
    "reward/selected_mean": Guide(
        "reward/mean, or above it with `algorithm.train_on_best`",
        "do not compare it with evaluations",
    ),
    "reward_parts/<part>": Guide(
        "the part that you care about rises", "one that rises alone is being gamed: weigh it less"
    ),
    "eval/policy_version": Guide("near the row's step", "evaluations run beside training"),
    "eval/version_span": Guide(
        "0 with `on_publish=finish`, else small", "the evaluation is of several versions at once"
    ),
    "eval/<task>/greedy": Guide("rises", EVALUATION),
    "eval/<task>/mean@<k>": Guide("rises", EVALUATION),
    "eval/<task>/pass@<k>": Guide(
        "rises, or stays while mean@k rises", "if it falls the policy narrows: see `entropy`"
    ),
    "eval/<task>/greedy_reward": Guide("rises", EVALUATION),
    "eval/<task>/sampled_reward": Guide("near reward/mean of that task", EVALUATION),
    "eval/<task>/greedy_failed_scores": Guide("0", GRADER),
    "eval/<task>/sampled_failed_scores": Guide("0", GRADER),
    "eval/<task>/greedy_failed_share": Guide("0", GRADER),
    "eval/<task>/sampled_failed_share": Guide("0", GRADER),
    "task/<task>/token_share": Guide(
        "as intended", "weights count prompts: [Several tasks](mixtures.md)"
    ),
    "task/<task>/reward_mean": Guide("rises", FLAT),
    "task/<task>/reward_std": Guide("above 0", FLAT),
    "task/<task>/truncated_share": Guide("below 0.2", CUT),
    "task/<task>/filtered": Guide(
        "a part of consumed", "most groups teach nothing: use difficulty, or other problems"
    ),
    "task/<task>/dropped": Guide("0", "the log names the prompts or the reason"),
    "response_length/mean": Guide(
        "changes slowly", "growth without reward: `algorithm.aggregation`, overlong penalty"
    ),
    "response_length/truncated_share": Guide("below 0.2", CUT),
    "train/single_turn_share": Guide("below 0.3", "lower `algorithm.turn_share`"),
    "staleness/mean": Guide(
        "below 0.9 of its bound", "lower `schedule.max_staleness`, or raise it if engines wait"
    ),
    "staleness/max": Guide("at most max(H, M·E)-1+eta, always", "above it is a bug of rlcore"),
    "staleness/in_flight_mean": Guide(
        "smaller than the bound", "long answers: `on_publish=in_flight`, shorter answers"
    ),
    "staleness/in_buffer_mean": Guide(
        "smaller than the bound", f"samples wait for the learner: {ENGINES_WAIT}"
    ),
    "mismatch/kl_k1": Guide("below 0.05", SAME),
    "mismatch/kl_k3": Guide("below 0.05; bfloat16 alone 0.001", SAME),
    "mismatch/abs_dlogp_mean": Guide("below 0.15; bfloat16 alone 0.04", SAME),
    "mismatch/abs_dlogp_max": Guide(
        "below 3", "single wild tokens: [veto](corrections/veto.md), [dvp](corrections/dvp.md)"
    ),
    "mismatch/ess": Guide("above 0.8", ESS),
    "mismatch/ratio_cv": Guide("below 0.5", ESS),
    "mismatch/acceptance": Guide("above 0.8", ESS),
    "mismatch/truncated_share": Guide("below 0.02", ESS),
    "mismatch/masked_share": Guide("below 0.05", ESS),
    "mismatch/veto_share": Guide("0", "[veto](corrections/veto.md)"),
    "mismatch/nonfinite_share": Guide("0", "[NaN](troubleshooting.md#the-loss-is-nan)"),
    "mismatch/outside_share": Guide("below 0.001", "[dvp](corrections/dvp.md#what-to-watch)"),
    "mismatch/coverage_mean": Guide("above 0.99", "[dvp](corrections/dvp.md#what-to-watch)"),
    "mismatch/z_approx": Guide("near mismatch/acceptance", "raise `rollout.logprobs_k`"),
    "mismatch/kappa": Guide("0.9 to 1.1", "raise `rollout.logprobs_k`"),
    "mismatch/unknown_share": Guide("below 0.3", "raise `rollout.logprobs_k`"),
    "mismatch/routes_differ": Guide(
        "below 0.1; grows with staleness", "fresher samples: `schedule.max_staleness`"
    ),
    "mismatch/ais_alpha": Guide("0 to 1", "[ais](corrections/ais.md#what-to-watch)"),
    "mismatch/ais_alpha_<signal>": Guide("0 to 1", "[ais](corrections/ais.md#what-to-watch)"),
    "correction/kept_share": Guide("above 0.8", ESS),
    "correction/weight_mean": Guide("0.8 to 1.2", ESS),
    "correction/zero_weight_share": Guide("below 0.1", ESS),
    "correction/<name>/<statistic>": Guide("depends on the correction", CORRECTION),
    "loss/policy": Guide("any: it says nothing about learning", "look at reward/mean"),
    "loss/kl": Guide(
        "rises slowly", "[KL rises](troubleshooting.md#kl-rises); `algorithm.kl_coef`"
    ),
    "loss/sparse_policy": Guide("any", "look at `loss/distill_kl`"),
    "loss/distill_kl": Guide("falls", "raise `learner.distill.lr` or its `lora.rank`"),
    "grad_norm": Guide(
        "no jumps; often near `learner.grad_clip`", "ten times its median: lower `learner.lr`"
    ),
    "entropy": Guide(
        "falls slowly, above 0.01",
        "collapse: lower `learner.lr`, raise `algorithm.eps_high` or `algorithm.entropy_coef`",
    ),
    "lr": Guide("as scheduled", "with [vcpo](corrections/vcpo.md) its factor is in it"),
    "policy/<statistic>": Guide(
        "clipped shares 0 in phases of one step, below 0.3 in longer ones",
        f"{NEVER_BINDS}; above it lower `learner.lr` or the phase's steps",
    ),
    "train/overlong_filtered": Guide("a few", CUT),
    "train/positions": Guide(
        "near train/sequence_positions, or below it with shared prefixes",
        "padding: `learner.layout`, `learner.micro_batch_tokens`",
    ),
    "draft/<statistic>": Guide(
        "its KL falls", "[Drafts](cheap-actors.md#drafts): `learner.draft.lr`, `.kl_coef`"
    ),
    "distill/<statistic>": Guide("no jumps", "lower `learner.distill.lr`"),
    "time/wait_data_s": Guide("near 0 when asynchronous", LEARNER_WAITS),
    "time/rollout_s": Guide("near time/step_s when asynchronous", ENGINES_WAIT),
    "time/learn_s": Guide("at most time/step_s", ENGINES_WAIT),
    "time/publish_s": Guide("below 0.05 of time/step_s", LEARNER_WAITS),
    "time/checkpoint_s": Guide("below 0.02 of the time", "raise `checkpoint.every_s`"),
    "time/eval_s": Guide("any: beside training", "fewer `evaluation.prompts`"),
    "throughput/rollout_tokens_per_s": Guide("steady", LEARNER_WAITS),
    "throughput/train_tokens_per_s": Guide("steady", ENGINES_WAIT),
    "buffer/groups": Guide(
        "at most `schedule.groups_per_step` times the bound", f"always full: {ENGINES_WAIT}"
    ),
    "ledger/<count>": Guide(
        "`failed`, `score_errors`, `score_timeouts` near 0", f"failed scores: {GRADER}"
    ),
    "ledger/<outcome>/<reason>": Guide(
        "no `failed/...`, no `evicted/stale`", "[Resume and faults](faults.md)"
    ),
    "checkpoint/step": Guide("grows", "[Checkpoints](faults.md#checkpoints)"),
    "checkpoint/failed": Guide("0", "the disk is full or hangs: the run goes on and tries again"),
    "checkpoint/interval_s": Guide(
        "`checkpoint.every_s`", "longer: checkpoints cost over 2%, and it was raised by the run"
    ),
    "rollout/migrated_requests": Guide(
        "0", "one actor is slow, or raise `rollout.request_timeout_s`"
    ),
    "rollout/<statistic>": Guide(
        "`replacements` does not grow", "the log has the reason of each replacement"
    ),
    "metrics/nonfinite": Guide("0", "[NaN](troubleshooting.md#the-loss-is-nan)"),
}
