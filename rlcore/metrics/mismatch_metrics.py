"""Metrics of the mismatch between actors and learner: its means and its tails."""

from rlcore.metrics.metric import Metric

SAME = "of actor and learner: [KL rises](troubleshooting.md#kl-rises)"
ESS = "[ESS falls](troubleshooting.md#ess-falls)"
TAILS = "[Mismatch](mismatch.md): more pages, layers kept precise, fresher samples"
PERCENTILES = (1, 5, 50, 95, 99)
AIS = "[ais](corrections/ais.md#what-to-watch)"

MISMATCH_METRICS: tuple[Metric, ...] = (
    Metric(
        "mismatch/kl_k1",
        "nats",
        "KL(p_inf || p_ref) by k1, tokens before rejection",
        healthy="below 0.05",
        otherwise=SAME,
    ),
    Metric(
        "mismatch/kl_k3",
        "nats",
        "KL(p_inf || p_ref) by k3, tokens before rejection",
        healthy="below 0.05; bfloat16 alone 0.001",
        otherwise=SAME,
    ),
    Metric("mismatch/tokens", "tokens", "with a ratio p_ref/p_inf: those that the others are of"),
    Metric(
        "mismatch/abs_dlogp_mean",
        "nats",
        "mean |log p_ref - log p_inf|",
        healthy="below 0.15; bfloat16 alone 0.04",
        otherwise=SAME,
    ),
    Metric(
        "mismatch/abs_dlogp_max",
        "nats",
        "maximum |log p_ref - log p_inf|",
        "max",
        healthy="below 3",
        otherwise="single wild tokens: [veto](corrections/veto.md), [dvp](corrections/dvp.md)",
    ),
    Metric("mismatch/abs_dprob_mean", "probability", "mean |p_ref - p_inf| of the sampled tokens"),
    Metric(
        "mismatch/ess",
        "share",
        "effective sample size of the ratios p_ref/p_inf over the number of tokens",
        healthy="above 0.8",
        otherwise=ESS,
    ),
    Metric(
        "mismatch/ratio_cv",
        "1",
        "coefficient of variation of the ratios p_ref/p_inf",
        healthy="below 0.5",
        otherwise=ESS,
    ),
    Metric(
        "mismatch/acceptance",
        "share",
        "mean of min(1, p_ref/p_inf): tokens that OBRS would keep at lambda 1",
        healthy="above 0.8",
        otherwise=ESS,
    ),
    Metric(
        "mismatch/truncated_share",
        "share",
        "tokens with p_ref/p_inf above 2",
        healthy="below 0.02",
        otherwise=ESS,
    ),
    Metric(
        "mismatch/masked_share",
        "share",
        "tokens with p_ref/p_inf outside [0.5, 2]",
        healthy="below 0.05",
        otherwise=ESS,
    ),
    Metric(
        "mismatch/veto_share",
        "share",
        "sequences with a token of p_ref/p_inf below 1e-4",
        healthy="0",
        otherwise="[veto](corrections/veto.md)",
    ),
    Metric(
        "mismatch/nonfinite_share",
        "share",
        "tokens without a usable log-prob, excluded from the other statistics",
        healthy="0",
        otherwise="[NaN](troubleshooting.md#the-loss-is-nan)",
    ),
    Metric(
        "mismatch/unstored_share",
        "share",
        "truncated sampling: tokens whose kept set is not stored whole; they leave the loss",
        healthy="0",
        otherwise="raise `rollout.logprobs_k`, or bound the sets with `rollout.top_k`",
    ),
    Metric(
        "mismatch/drift",
        "share",
        "length of (p_inf - p_ref) E[A | state], which moves a policy where nothing is learned, "
        "over the centred gradient's; over eight steps",
        healthy="below 0.1",
        otherwise="[centre](corrections/centre.md)",
    ),
    Metric(
        "mismatch/tv",
        "probability",
        "total variation of actors and learner over the actors' stored tokens and one bin for all "
        "others: at least",
    ),
    Metric("mismatch/tv_bound", "probability", "the same: at most"),
    Metric(
        "mismatch/outside_share",
        "share",
        "tokens outside the learner's safe set (DVP)",
        healthy="below 0.001",
        otherwise="[dvp](corrections/dvp.md#what-to-watch)",
    ),
    Metric(
        "mismatch/unlikely_share",
        "share",
        "tokens with p_ref below e^-13 of the learner's largest: outside DVP's default safe set",
    ),
    Metric(
        "mismatch/floor_tokens",
        "tokens",
        "T*m: expected tokens of an answer that the actors' probability floor has drawn",
        healthy="below 1",
        otherwise="[dvp](corrections/dvp.md)",
    ),
    Metric(
        "mismatch/tail_slope",
        "1",
        "slope of log p_inf on log p_ref over tokens outside DVP's default safe set, at least 40: "
        "1 for errors, below 0.25 for a floor of probabilities",
        healthy="above 0.5",
        otherwise="[dvp](corrections/dvp.md)",
    ),
    Metric(
        "mismatch/floor_level",
        "1",
        "of the same tokens: geometric mean of p_inf over the learner's largest p_ref",
    ),
    Metric(
        "mismatch/floor_mass",
        "probability",
        "m: probability that actors put on what the learner finds all but impossible",
    ),
    Metric(
        "mismatch/n_star",
        "answers",
        "N*: answers, of groups whose rewards differ, above which correcting pays: mismatch/"
        "variance_added over mismatch/bias2; left out where no bias is seen",
        healthy="above the run's answers a step: no correction is needed",
        otherwise="[which one](corrections/index.md#which-one)",
    ),
    Metric(
        "mismatch/fixed_share",
        "share",
        "of the mean square of min(p_ref/p_inf, 10) - 1, over tokens that several answers of a "
        "group have after the same ones. 1: a function of the context, 0: drawn anew; neither says "
        "that a bias adds up over contexts",
    ),
    Metric("mismatch/repeated_share", "share", "tokens from which mismatch/fixed_share is taken"),
    Metric(
        "mismatch/bias2",
        "1",
        "squared bias of the uncorrected gradient of the output layer, of an answer, by products "
        "between groups of the last 14 steps",
    ),
    Metric("mismatch/variance_added", "1", "variance of an answer that correcting adds to it"),
    *(
        Metric(f"mismatch/ratio_p{percent}", "1", f"percentile {percent} of p_ref/p_inf")
        for percent in PERCENTILES
    ),
    *(
        Metric(
            f"mismatch/abs_dlogp_p{percent}", "nats", f"percentile {percent} of |log p_ref/p_inf|"
        )
        for percent in PERCENTILES
    ),
    Metric(
        "mismatch/agreement_p5",
        "1",
        "5th percentile of min(p_ref/p_inf, p_inf/p_ref): the set-point of actors",
        healthy="above 0.86",
        otherwise=TAILS,
    ),
    Metric(
        "mismatch/stretch_<n>/agreement_p5",
        "1",
        "mismatch/agreement_p5 at the positions of an entry of sparse.blocks_by_length",
        healthy="above 0.86",
        otherwise=TAILS,
    ),
    Metric(
        "mismatch/below_086_share",
        "share",
        "tokens of which that is below 0.86",
        healthy="below 0.05",
        otherwise=TAILS,
    ),
    *(
        Metric(
            f"mismatch/eighth_<n>/ratio_p{percent}",
            "1",
            f"mismatch/ratio_p{percent} in an eighth of each answer, from the first",
        )
        for percent in PERCENTILES
    ),
    *(
        Metric(
            f"mismatch/eighth_<n>/abs_dlogp_p{percent}",
            "nats",
            f"mismatch/abs_dlogp_p{percent} in an eighth of each answer",
        )
        for percent in PERCENTILES
    ),
    Metric(
        "mismatch/coverage_mean",
        "probability",
        "p_ref's mass on its safe set (DVP), or on the sets that sampling kept",
        healthy="above 0.99 (DVP)",
        otherwise="[dvp](corrections/dvp.md#what-to-watch)",
    ),
    Metric(
        "mismatch/z_approx",
        "probability",
        "OBRS normaliser on the stored top k, lambda 1",
        healthy="near mismatch/acceptance",
        otherwise="raise `rollout.logprobs_k`",
    ),
    Metric(
        "mismatch/kappa",
        "1",
        "bias correction of z_approx",
        healthy="0.9 to 1.1",
        otherwise="raise `rollout.logprobs_k`",
    ),
    Metric(
        "mismatch/unknown_share",
        "share",
        "top-k entries of the learner that the actor did not return",
        healthy="below 0.3",
        otherwise="raise `rollout.logprobs_k`",
    ),
    Metric(
        "mismatch/routes_differ",
        "share",
        "token-layer pairs with other experts than p_new's",
        healthy="below 0.1; grows with staleness",
        otherwise="fresher samples: `schedule.max_staleness`",
    ),
    Metric(
        "mismatch/ais_alpha",
        "1",
        "AIS: weight of the correction, 0 off to 1 full",
        healthy="0 to 1",
        otherwise="[ais](corrections/ais.md#what-to-watch)",
    ),
    Metric(
        "mismatch/ais_alpha_ess",
        "1",
        "AIS: the signal of the effective sample size",
        healthy="0 to 1",
        otherwise=AIS,
    ),
    Metric(
        "mismatch/ais_alpha_mis",
        "1",
        "AIS: the signal of the mismatch",
        healthy="0 to 1",
        otherwise=AIS,
    ),
    Metric(
        "mismatch/ais_alpha_var",
        "1",
        "AIS: the signal of the variance",
        healthy="0 to 1",
        otherwise=AIS,
    ),
    Metric(
        "step_bound/answer_kl",
        "nats",
        "D: KL of an answer, of at most 128 tokens, from its actors' policy to the learner's, "
        "above what fresh tokens have",
        healthy="below 0.3; from 1.5 on runs lose their policy",
        otherwise="lower `learner.lr` or `schedule.max_staleness`",
    ),
    Metric(
        "step_bound/scale",
        "1",
        "`learner.step_bound`: factor of the step's learning rate; 0: the step was held",
        healthy="1, or above 0.5",
        otherwise="[Step bound](step_bound.md)",
    ),
    Metric("step_bound/bound", "nats", "`learner.step_bound`, for step_bound/answer_kl"),
    Metric(
        "step_bound/floor", "nats", "mean k3 of fresh tokens: rounding, sparse attention, drafts"
    ),
    Metric(
        "step_bound/kappa",
        "1",
        "step_bound/answer_kl over the squared sum of the learning rates that led to it; falls by "
        "a fifth a step where it is not measured",
    ),
    Metric(
        "step_bound/moved",
        "1",
        "summed learning rates of the steps since a batch's tokens were sampled, root mean square",
    ),
)
