"""What is healthy in a metric, and what to do when it leaves that range: for docs/metrics.md.

By the names of `names.py`. A metric without an entry describes a run and has no range of its own.
"""

from __future__ import annotations

from typing import NamedTuple


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
    "reward/kept_mean": Guide(
        "reward/mean, or above it with `algorithm.keep_best`", "do not compare it with evaluations"
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
    "train/turns_alone_share": Guide("below 0.3", "lower `algorithm.turn_share`"),
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
    "mismatch/cv": Guide("below 0.5", ESS),
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
    "rollout/cut_requests": Guide("0", "one actor is slow, or raise `rollout.request_timeout_s`"),
    "rollout/<statistic>": Guide(
        "`replacements` does not grow", "the log has the reason of each replacement"
    ),
    "metrics/nonfinite": Guide("0", "[NaN](troubleshooting.md#the-loss-is-nan)"),
}
