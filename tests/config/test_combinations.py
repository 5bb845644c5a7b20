"""The table of combinations: it is whole, its tests exist, and a run is refused by it."""

import ast
from itertools import combinations
from pathlib import Path

import pytest

from rlcore.config.combinations import FEATURES, PROVEN, REFUSED, WAYS, refused, sentence
from rlcore.config.compose import load
from rlcore.errors import UserError

TESTS = Path(__file__).parents[1]
SPARSE = ("actor=sparse", "actor.sparse.prefix_caching=false")
CRITIC = ("algorithm=ppo", "critic=model", "critic.traces=gae")
DRAFT = ("actor=draft", "actor.draft.draft_path=f", "learner.draft={}")
ROUNDED = ("actor=fp8", "actor.fp8.rounding=int3", "learner.round_as=fp8")
#: words of a run that uses a way alone
USED = {
    "ZeRO-3": ("learner.zero_stage=3",),
    "parts of sequences": ("learner.ranks=2", "learner.sequence_parallel=2"),
    "parts of layers": ("learner.ranks=2", "learner.tensor_parallel=2"),
    "adapters": ("learner.lora={targets: [q_proj]}",),
    "kept passes": ("learner.activation_cache_mib=8",),
    "router replay": ("learner.router_replay=true",),
    "sparse training": (*SPARSE, "learner.train_sparse=true"),
    "sparse copy": (*SPARSE, "learner.distill={}"),
    "trained draft": DRAFT,
    "offloaded optimizer": ("learner.zero_stage=3", "learner.offload.optimizer=cpu"),
    "making room": (
        *("schedule=on_policy", "schedule.colocated=true"),
        "learner.offload_while_sampling=true",
    ),
    "parts of experts": ("learner.ranks=2", "learner.expert_parallel=2"),
    "masked diffusion": ("experiment=diffusion",),
    "critic": CRITIC,
    "bitwise": ("bitwise=true", "schedule=on_policy"),
    "rounding learner": ROUNDED,
    "teacher": ("teacher=policy", "teacher.context=best"),
    "Liger's layers": (
        *("learner.layers=liger", "learner.num_gpus=1", "learner.zero_stage=1"),
        "actor.bf16.num_gpus=1",
    ),
    "compiled layers": ("learner.layers=compiled",),
    "FP8 products": ("learner.fp8=row",),
}


def _refusal(words) -> str:
    try:
        load(["run_dir=x", *words])
    except UserError as error:
        return str(error)
    return ""


def test_every_row_names_features_once_and_a_test_that_exists() -> None:
    rows = [*REFUSED, *PROVEN]
    assert {name for row in rows for name in row[:2]} <= set(FEATURES)
    pairs = [frozenset(row[:2]) for row in rows]
    assert len(set(pairs)) == len(pairs) and all(len(pair) == 2 for pair in pairs)
    for row in PROVEN:
        file, _, name = row.test.partition(": ")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, row


def test_every_pair_of_ways_is_proven_or_refused() -> None:
    listed = [frozenset(row[:2]) for row in (*refused(), *PROVEN)]
    assert len(set(listed)) == len(listed)
    assert {frozenset(pair) for pair in combinations(WAYS, 2)} <= set(listed)


def test_a_refusal_has_a_remedy() -> None:
    for row in refused():
        said = sentence(row, "a=1", "b=2")
        _, remedy = said.replace(";", ":").rsplit(": ", 1)
        assert "a=1" in said and remedy.endswith(".") and "use ." not in said, row


@pytest.mark.parametrize("name", USED)
def test_a_way_is_accepted_alone_and_seen(name) -> None:
    config = load(["run_dir=x", *USED[name]])
    assert [way for way, feature in WAYS.items() if feature.setting(config)] == [
        *(["ZeRO-3"] if name == "offloaded optimizer" else []),
        name,
    ]


def test_what_is_proven_is_accepted() -> None:
    assert set(USED) == set(WAYS)
    for a, b in (row[:2] for row in PROVEN):
        orders = [*USED[a], *USED[b]], [*USED[b], *USED[a]]
        assert "" in map(_refusal, orders), (a, b, _refusal(orders[0]))
