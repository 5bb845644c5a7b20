"""The table of features that are used together: which pairs a test has shown, and which are
refused.

`WAYS` are ways in which a learner divides, holds, computes or extends the policy. A pair that is
not in `PROVEN` is refused: each of them changes what the others rely on. Of `OTHERS` the pairs in
`REFUSED` are refused. `docs/generate.py` writes docs/combinations.md from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from rlcore.config.kinds import dvp_of, shown
from rlcore.config.parts import PARTS
from rlcore.config.schema import RunConfig
from rlcore.engine_facts import Divided
from rlcore.spec import refuse


class Feature(NamedTuple):
    """Something that a run uses or not.

    Example: Feature(lambda c: c.bitwise and "bitwise=true", "bitwise=false")
    """

    setting: Callable[[RunConfig], str | bool | None]  # by which it is used; empty: it is not
    without: str = ""  # a setting without it


class RefusedPair(NamedTuple):
    """A pair that is refused. `why` ends with a remedy and may hold {a} and {b}, the settings by
    which they are used; empty: no test has shown the pair."""

    a: str
    b: str
    why: str = ""


class ProvenPair(NamedTuple):
    """A pair that a test has shown: file below tests/, and function."""

    a: str
    b: str
    test: str


def _divided(what: Divided, without: str) -> Feature:
    def used(c: RunConfig) -> str | bool:
        found = (f"learner.{d.name}={d.ranks}" for d in c.learner.divisions if d.of == what)
        return next(found, False)

    return Feature(used, without)


def _switch(name: str) -> Feature:
    return Feature(lambda c: getattr(c.learner, name) and f"learner.{name}=true", f"{name}=false")


def _section(name: str) -> Feature:
    def used(c: RunConfig) -> str | bool:
        return getattr(c.learner, name) is not None and f"learner.{name}"

    return Feature(used, f"learner.{name}=null")


def _cut(c: RunConfig) -> str | bool:
    r, dvp = c.rollout, dvp_of(c) is not None
    on = {"top_p": r.top_p < 1, "top_k": r.top_k > 0, "min_p": r.min_p > 0 and not dvp}
    return next((f"rollout.{n}={getattr(r, n)}" for n in on if on[n]), False)


def sent_adapters(c: RunConfig) -> Iterator[str]:
    """Settings by which adapters are published by themselves."""
    own = {part.without.partition("=")[0]: part.adapters(c) for part in PARTS}
    for name, lora in {"learner": c.learner.lora, **own}.items():
        if lora is not None and lora.publish == "adapter":
            yield f"{name}.lora.publish=adapter"


def _speculation(c: RunConfig) -> str | bool:
    return next((f"actor.{n}.speculate" for n, a in c.actor.items() if a.speculate), False)


def _offload(c: RunConfig) -> str | bool:
    place = c.learner.offload.optimizer
    return place != "none" and f"learner.offload.optimizer={place}"


def _moved(what: str) -> Feature:
    def used(c: RunConfig) -> str | bool:
        targets = ((n, a.target) for n, a in c.actor.items() if a.target is not None)
        return next((f"actor.{n}.target.moves={what}" for n, t in targets if t.moves == what), "")

    return Feature(used)


# Of a pair that no test has shown, the sentence begins with the later one.
WAYS: dict[str, Feature] = {
    "ZeRO-3": Feature(lambda c: c.learner.zero_stage == 3 and "learner.zero_stage=3"),
    "parts of sequences": _divided("sequences", "sequence_parallel=1"),
    "parts of layers": _divided("layers", "tensor_parallel=1"),
    "adapters": _section("lora"),
    "kept passes": Feature(
        lambda c: (
            c.learner.activation_cache_mib > 0
            and f"learner.activation_cache_mib={c.learner.activation_cache_mib}"
        ),
        "activation_cache_mib=0",
    ),
    "router replay": _switch("router_replay"),
    "offloaded optimizer": Feature(_offload, "learner.offload.optimizer=none"),
    "making room": _switch("offload_while_sampling"),
    "parts of experts": _divided("experts", "expert_parallel=1"),
    "masked diffusion": Feature(
        lambda c: c.model.diffusion is not None and "model.diffusion", "model.diffusion=null"
    ),
    **{part.name: Feature(part.setting, part.without) for part in PARTS},
}
OTHERS: dict[str, Feature] = {
    "value head": Feature(
        lambda c: c.critic.kind == "value_head" and "critic.kind=value_head", "critic=none"
    ),
    "previous policy as teacher": Feature(
        lambda c: c.teacher.kind == "previous" and "teacher.kind=previous", "teacher=none"
    ),
    "learner on GPUs": Feature(
        lambda c: c.learner.num_gpus > 0 and f"learner.num_gpus={c.learner.num_gpus:g}"
    ),
    "full KL": Feature(
        lambda c: (
            c.algorithm.kl_in_loss
            and c.algorithm.kl_estimator == "full"
            and "algorithm.kl_estimator=full"
        )
    ),
    "DVP": Feature(lambda c: dvp_of(c) is not None and shown("correction", c.correction)),
    "truncated sampling": Feature(_cut),
    "min-p": Feature(lambda c: c.rollout.min_p > 0 and f"rollout.min_p={c.rollout.min_p:g}"),
    "adapters published alone": Feature(lambda c: next(sent_adapters(c), False)),
    "proposing model": Feature(_speculation),
    "GPUs in turns": Feature(lambda c: c.schedule.colocated and "schedule.colocated=true"),
    "engines' own transport": Feature(
        lambda c: (
            c.cluster.transport in ("nccl", "ipc") and f"cluster.transport={c.cluster.transport}"
        )
    ),
    "environment": Feature(lambda c: bool(c.played) and "environments"),
    "ranks": Feature(lambda c: c.learner.ranks > 1 and f"learner.ranks={c.learner.ranks}"),
    "packed layout": Feature(lambda c: c.learner.layout == "packed" and "learner.layout=packed"),
    "moving pages": _moved("pages"),
    "moving layers": _moved("layers"),
    "V-trace": Feature(
        lambda c: c.critic.trained and c.critic.traces == "vtrace" and "critic.traces=vtrace"
    ),
    "ratio to p_inf": Feature(
        lambda c: c.algorithm.ratio_to == "p_inf" and "algorithm.ratio_to=p_inf"
    ),
    "rewards of turns": Feature(
        lambda c: c.algorithm.turn_share > 0 and f"algorithm.turn_share={c.algorithm.turn_share:g}"
    ),
    "KL in the reward": Feature(lambda c: c.algorithm.kl_in_reward and "algorithm.kl_in=reward"),
    "dynamic sampling": Feature(
        lambda c: c.algorithm.dynamic_sampling and "algorithm.dynamic_sampling=true"
    ),
    "FlashAttention 2": Feature(
        lambda c: (
            c.learner.attention == "flash_attention_2" and "learner.attention=flash_attention_2"
        )
    ),
    "always a pass for p_ref": Feature(
        lambda c: c.learner.ref_pass == "always" and "learner.ref_pass=always"
    ),
}
FEATURES = WAYS | OTHERS

_UNEQUAL = "might decide unequally what to keep; choose activation_cache_mib=0."
_DENSE = "{a} splits dense attention only, and {b} attends sparsely: use %s=1."
_DRAFT = (
    "{a} would hold for the ranks of {b} too, which have no use for it: use %s=1, or a draft that "
    "is not trained."
)
_TURNS = "{a} is not proven with {b}: use 1, or GPUs of the learner's own."
_SUMS = (
    "{a} cannot be combined with {b}, whose sums the learner forms in another order than its "
    "actors: leave it out."
)
_PROPOSED = "{a} is not proven with {b}: leave one of them out."
_MIN_P = (
    "{a} cannot be combined with {b}: vLLM verifies proposed tokens without min_p, so leave one of "
    "them out."
)
_STAGES = "choose zero_stage=0, 1 or 2."
REFUSED = (
    # before what its ZeRO-3 is refused with
    RefusedPair("offloaded optimizer", "sparse copy"),
    RefusedPair("offloaded optimizer", "trained draft"),
    RefusedPair(
        "parts of layers",
        "parts of sequences",
        "{a} and {b} both divide the attention heads: leave one of them at 1.",
    ),
    RefusedPair("parts of layers", "ZeRO-3", "{a} divides what {b} divides too: " + _STAGES),
    RefusedPair(
        "parts of layers",
        "making room",
        "{a} gathers the masters that {b} moves to the host: choose one of the two.",
    ),
    RefusedPair(
        "parts of layers",
        "adapters",
        "{a} divides the layers that {b} adapts: use tensor_parallel=1.",
    ),
    RefusedPair(
        "parts of layers",
        "kept passes",
        "{a} and {b}: ranks with parts of the same layers " + _UNEQUAL,
    ),
    RefusedPair(
        "parts of sequences",
        "kept passes",
        "{a} and {b}: ranks with parts of the same sequences " + _UNEQUAL,
    ),
    *(
        RefusedPair(parts, sparse, _DENSE % name)
        for parts, name in (
            ("parts of sequences", "sequence_parallel"),
            ("parts of layers", "tensor_parallel"),
        )
        for sparse in ("sparse training", "sparse copy")
    ),
    RefusedPair("parts of sequences", "trained draft", _DRAFT % "sequence_parallel"),
    RefusedPair("parts of layers", "trained draft", _DRAFT % "tensor_parallel"),
    RefusedPair(
        "parts of sequences",
        "router replay",
        "{a} has no routes for parts of sequences: use learner.router_replay=false, or "
        "sequence_parallel=1.",
    ),
    RefusedPair(
        "parts of sequences",
        "FlashAttention 2",
        "{a} has its own attention name, which transformers would take for a package with "
        "{b}: choose auto, varlen or sdpa.",
    ),
    RefusedPair("parts of experts", "ZeRO-3", "{a} is not proven with {b}: " + _STAGES),
    *(
        RefusedPair("GPUs in turns", parts, _TURNS)
        for parts in ("parts of sequences", "parts of layers", "parts of experts")
    ),
    RefusedPair(
        "making room",
        "offloaded optimizer",
        "{a} would move what {b} keeps off the GPU at all times: choose one.",
    ),
    RefusedPair(
        "kept passes",
        "always a pass for p_ref",
        "{a} saves the pass that {b} asks for: choose one.",
    ),
    RefusedPair(
        "kept passes",
        "ZeRO-3",
        "{a} needs whole weights, and {b} gathers them for one pass at a time: " + _STAGES,
    ),
    RefusedPair("sparse copy", "sparse training", "{a} and {b} are two methods: choose one."),
    RefusedPair(
        "sparse copy",
        "adapters",
        "{a} puts its own adapters on a policy that is trained whole: leave {b}=null.",
    ),
    RefusedPair(
        "ZeRO-3", "sparse copy", "{a} splits the weights that {b}'s sparse copy shares: " + _STAGES
    ),
    RefusedPair(
        "FP8 products",
        "ZeRO-3",
        "{a} keeps the weights that {b} gathers until the backward pass, so that a rank would hold "
        "the whole model: choose learner.zero_stage=0, 1 or 2.",
    ),
    # its trunk is the policy's tensors, whole and without adapters
    RefusedPair("value head", "ZeRO-3"),
    RefusedPair("value head", "adapters"),
    RefusedPair("rounding learner", "value head"),
    RefusedPair("rounding learner", "learner on GPUs"),
    # its weights are written whole, by one rank
    RefusedPair("previous policy as teacher", "ZeRO-3"),
    RefusedPair(
        "full KL",
        "teacher",
        "{a} and {b} both take another policy whole in the pass that is differentiated: use "
        "kl_estimator=k1, k2 or k3, or algorithm.kl_coef=0.",
    ),
    *(
        RefusedPair("bitwise", other, _SUMS)
        for other in ("adapters", "sparse copy", "trained draft")
    ),
    *(
        RefusedPair("bitwise", other)
        for other in ("environment", "learner on GPUs", "ranks", "packed layout")
    ),
    RefusedPair(
        "bitwise",
        "DVP",
        "{a} cannot be combined with correction=dvp, which truncates: leave it out.",
    ),
    RefusedPair(
        "bitwise",
        "truncated sampling",
        "{a} cannot be combined with {b}, whose kept sets engine and learner sum in other orders: "
        "leave it off.",
    ),
    *(
        RefusedPair("proposing model", other, _PROPOSED)
        for other in (
            *("bitwise", "router replay", "adapters published alone", "GPUs in turns"),
            "engines' own transport",
        )
    ),
    RefusedPair("proposing model", "DVP", _MIN_P.replace("{b}", "correction=dvp")),
    RefusedPair("proposing model", "min-p", _MIN_P),
    RefusedPair(
        "adapters published alone",
        "engines' own transport",
        "{a} cannot be combined with {b}, whose receivers load whole weights: use object_store or "
        "disk, or publish=merged.",
    ),
    RefusedPair(
        "adapters published alone",
        "trained draft",
        "{a} cannot be combined with {b}, whose KL is to the whole policy: use publish=merged.",
    ),
    RefusedPair(
        "moving layers",
        "adapters published alone",
        "{a} cannot be combined with {b}, which publishes no weights that could be rounded again: "
        "use publish=merged.",
    ),
    RefusedPair(
        "moving pages",
        "sparse training",
        "{a} cannot be combined with {b}: the learner then attends to the same pages and sees no "
        "mismatch of them, so leave one out.",
    ),
    RefusedPair(
        "DVP",
        "trained draft",
        "{a} cannot be combined with {b}: its learner takes log-probs over the whole vocabulary, "
        "and dvp's actors sample from the safe set; use one or the other.",
    ),
    RefusedPair(
        "truncated sampling",
        "sparse copy",
        "{a} cannot be combined with {b}, which compares whole distributions: leave it off.",
    ),
    RefusedPair(
        "DVP",
        "sparse copy",
        "{a} cannot be combined with {b}: under dvp a token outside the policy's safe set has no "
        "log-prob for the sparse copy to follow; use one or the other.",
    ),
    RefusedPair(
        "rewards of turns",
        "critic",
        "{a} mixes rewards to go into advantages of groups, and {b} has values in their place: "
        "leave it 0 (algorithm.credit says what a value is of).",
    ),
    RefusedPair(
        "V-trace",
        "ratio to p_inf",
        "{a} is by p_ref/p_inf, and {b} holds no p_ref: use ratio_to=p_ref, or critic.traces=gae.",
    ),
    RefusedPair(
        "KL in the reward",
        "rewards of turns",
        "{a} takes the KL off rewards of whole episodes, and {b} has others: leave it 0, or use "
        "kl_in=loss.",
    ),
    RefusedPair(
        "rewards of turns",
        "dynamic sampling",
        "{a} cannot be combined with {b}, which filters groups of equal rewards although their "
        "turns may differ: leave one of them off.",
    ),
)
_SPLIT = (
    "learner/test_split_learner.py: test_parts_of_sequences_beside_shares_of_a_batch_change_nothing"
)
_PREFIX = "learner/test_learner_ranks.py: test_a_shared_prefix_changes_no_gradient_at_any_stage"
_IN_TURNS = "commands/test_train_schedules.py: test_a_kind_of_run_takes_turns"
_LIGER = (
    "learner/test_layer_kernels.py: "
    "test_liger_s_kernels_in_the_interpreter_train_as_transformers_layers"
)
_EXPERTS = "learner/test_learner_ranks.py: test_experts_are_published_one_by_one_at_any_stage"
PROVEN = (
    ProvenPair("ZeRO-3", "parts of sequences", _SPLIT),
    ProvenPair("adapters", "parts of sequences", _SPLIT),
    ProvenPair("ZeRO-3", "adapters", _PREFIX),
    ProvenPair("ZeRO-3", "sparse training", _PREFIX),
    ProvenPair("adapters", "sparse training", _PREFIX),
    ProvenPair("ZeRO-3", "router replay", _EXPERTS),
    ProvenPair(
        "ZeRO-3",
        "offloaded optimizer",
        "learner/test_offload.py: test_offload_changes_no_weight_checkpoint_or_publication",
    ),
    ProvenPair(
        "ZeRO-3",
        "making room",
        "learner/test_learner_ranks.py: "
        "test_a_learner_that_makes_room_between_steps_learns_the_same",
    ),
    ProvenPair(
        "ZeRO-3",
        "masked diffusion",
        "learner/test_masked_ranks.py: test_two_sharded_ranks_have_the_gradient_of_one",
    ),
    ProvenPair(
        "ZeRO-3",
        "critic",
        "learner/test_critic_ranks.py: test_every_stage_takes_the_steps_of_one_rank",
    ),
    ProvenPair(
        "ZeRO-3",
        "rounding learner",
        "learner/test_rounded.py: test_zero_stages_round_whole_weights",
    ),
    ProvenPair(
        "ZeRO-3", "teacher", "learner/test_teacher_ranks.py: test_two_ranks_take_the_steps_of_one"
    ),
    ProvenPair("ZeRO-3", "Liger's layers", _LIGER),
    ProvenPair("adapters", "Liger's layers", _LIGER),
    ProvenPair(
        "adapters",
        "compiled layers",
        "learner/test_layer_kernels.py: test_compiled_layers_train_as_transformers_layers",
    ),
    ProvenPair(
        "adapters",
        "kept passes",
        "learner/test_learner_ranks.py: test_passes_that_are_kept_change_no_weight",
    ),
    ProvenPair(
        "adapters",
        "teacher",
        "learner/test_teacher_ranks.py: "
        "test_with_adapters_the_previous_policy_is_the_policy_to_rounding",
    ),
    ProvenPair("adapters", "making room", _IN_TURNS),
    ProvenPair("sparse copy", "making room", _IN_TURNS),
    ProvenPair(
        "kept passes",
        "router replay",
        "commands/test_train_models.py: test_what_is_trained_is_what_the_engine_serves",
    ),
    ProvenPair(
        "adapters",
        "critic",
        "learner/test_critic_ranks.py: test_adapters_learn_on_a_copy_that_is_frozen",
    ),
    ProvenPair(
        "adapters",
        "masked diffusion",
        "learner/test_masked_ranks.py: test_adapters_of_two_sharded_ranks_have_the_gradient_of_one",
    ),
    ProvenPair(
        "kept passes",
        "rounding learner",
        "learner/test_rounded.py: test_zero_stages_round_whole_weights",
    ),
    ProvenPair(
        "bitwise",
        "rounding learner",
        "commands/test_train_actors.py: test_log_probs_of_a_run_are_equal_to_the_bit",
    ),
    ProvenPair(
        "compiled layers",
        "FP8 products",
        "learner/test_layer_kernels.py: test_fp8_products_train_as_their_definition",
    ),
)


def refused() -> Iterator[RefusedPair]:
    """Every pair that is refused: those with a reason first, then pairs of `WAYS` without a
    test."""
    yield from REFUSED
    known = {frozenset(row[:2]) for row in (*REFUSED, *PROVEN)}
    for earlier, later in combinations(WAYS, 2):
        if {earlier, later} not in known:
            yield RefusedPair(later, earlier)


def sentence(row: RefusedPair, a: str, b: str) -> str:
    """The sentence on a pair that is used by the settings `a` and `b`."""
    untried = f"{{a}} is not proven with {{b}}: leave that out, or use {FEATURES[row.a].without}."
    return (row.why or untried).format(a=a, b=b)


def check_combinations(c: RunConfig) -> None:
    """Raise UserError for the first pair of features that is refused."""
    used = {name: str(feature.setting(c) or "") for name, feature in FEATURES.items()}
    for row in refused():
        a, b = used[row.a], used[row.b]
        refuse(bool(a and b), sentence(row, a, b))
