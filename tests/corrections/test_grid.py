"""Every combination of loss, correction, aggregation, step of a phase, KL and layout is exact, or
biased as its methods declare, or refused: by enumeration of the learner's own update."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import grid_page
import pytest
import torch
from grid_bandit import INF, KL_COEF, Policies, gradient
from grid_cells import (
    AGGREGATIONS,
    ESTIMATORS,
    EXACT,
    LOSS_SETTINGS,
    TIGHT,
    Cell,
    biases,
    cells,
    distance,
    error,
    fleets,
    lists,
    losses_of,
    opened,
    refusal,
    switches,
)

from rlcore.corrections import pipeline
from rlcore.corrections.pipeline import Pipeline
from rlcore.corrections.specs import CORRECTIONS
from rlcore.objectives.protocols import UNCORRECTED, Bias
from rlcore.objectives.specs import (
    ADVANTAGES,
    LOSSES,
    ObjectiveSpec,
    advantage_class,
    loss_class,
)
from rlcore.registry import load_object


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: handing parts of them to threads costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LAYOUTS = [{"ranks": 1, "parts": 3}, {"ranks": 2, "parts": 2}]


def accepted(loss: str, kls: tuple[str, ...], *, reverse: bool = False) -> Iterator[Cell]:
    chosen = (c for c in cells(reverse=reverse) if c.loss == loss and c.kl in kls)
    return (c for c in chosen if not refusal(c))


def spread(loss: str, **also: Any) -> Iterator[Cell]:
    """One cell of every list, which between them go through all means, steps and terms."""
    for i, chosen in enumerate(chosen for chosen in lists() if loss in losses_of(chosen)):
        mean, kl = AGGREGATIONS[i % 3], ESTIMATORS[i % len(ESTIMATORS)]
        cell = Cell(chosen, loss, mean, i % 2 == 1, kl, also=tuple(also.items()))
        if not refusal(cell):
            yield cell


def judge(cell: Cell) -> None:
    """Exact, or exact once what is declared is opened."""
    case = cell.case()
    size = error(case)
    if size > EXACT:
        declared = biases(case)
        names = [bias.name for bias in declared]
        assert names, f"{cell} is off by {size:.2g} and declares no bias"
        left = error(opened(case, declared))
        assert left <= EXACT, f"{cell} is off by {left:.2g} for other causes than {names}"


def judge_layouts(cell: Cell, layouts: list[dict[str, int]]) -> None:
    whole, _ = gradient(cell.case())
    for layout in layouts:
        found, _ = gradient(cell.case(), **layout)
        assert distance(found, whole) < 1e-6, f"{cell} with {layout}"


@pytest.mark.parametrize("loss", LOSS_SETTINGS)
def test_the_policy_gradient_is_exact_or_biased_as_declared(loss: str) -> None:
    for cell in accepted(loss, ("none",)):
        judge(cell)


@pytest.mark.parametrize("loss", LOSS_SETTINGS)
def test_a_kl_term_is_exact_or_biased_as_declared(loss: str) -> None:
    for cell in spread(loss):
        judge(cell)


@pytest.mark.parametrize("loss", ["ppo", "reinforce"])
def test_rejection_leaves_the_entropy_bonus_of_every_state(loss: str) -> None:
    """A state of which fewer tokens are accepted would count less without their weights."""
    for chosen in lists():
        if dict(chosen).keys() == {"jackpot"}:
            cell = Cell(chosen, loss, "seq-mean-token-mean", loss == "ppo", "entropy")
            if not refusal(cell):
                judge(cell)


@pytest.mark.parametrize("loss", ["ppo", "reinforce"])
def test_the_overlong_filter_is_a_bias_of_every_term(loss: str) -> None:
    shown = []
    for cell in spread(loss, overlong_filter=True):
        judge(cell)
        assert ObjectiveSpec.biases[0] in biases(cell.case())
        shown.append(error(cell.case()) > EXACT)
    # a mask may happen to leave only answers that the filter would leave, too
    assert shown.count(False) <= 0.02 * len(shown)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_a_ratio_to_p_inf_corrects_the_mismatch_itself(loss: str) -> None:
    also = (("ratio_to", "p_inf"),)
    for chosen in lists():
        if any(load_object(CORRECTIONS[name]).weighs for name, _ in chosen):
            continue
        for kl, later, mean in product(("none", "k3"), (False, True), AGGREGATIONS):
            cell = Cell(chosen, loss, mean, later, kl, also=also)
            around_ref = any(name == "kl_cov" for name, _ in chosen)  # its penalty needs p_ref
            if any(name == "centre" for name, _ in chosen) and not around_ref and refusal(cell):
                continue  # for its own reasons: gspo, or another mask than by the token
            assert bool(refusal(cell)) == around_ref
            if not around_ref:
                assert UNCORRECTED not in biases(cell.case())
                judge(cell)


OF_REWARDS = [name for name in ADVANTAGES if not advantage_class(name).needs_values]


@pytest.mark.parametrize("name", OF_REWARDS)
def test_advantages_of_samples_that_are_among_the_compared(name: str) -> None:
    """Beside corrections that reject nothing, over every two samples of a prompt."""
    declared = advantage_class(name).biases
    for chosen, later in (((), False), ((("tis", ()),), True), ((("dvp", ()),), False)):
        for loss, mean in (("ppo", AGGREGATIONS[0]), ("reinforce", AGGREGATIONS[2])):
            cell = Cell(chosen, loss, mean, later, "none", also=(("advantage", name),))
            judge(cell)
            case = cell.case()
            own = [bias for bias in biases(case) if bias in declared]
            wide = opened(case, [bias for bias in biases(case) if bias not in own])
            assert not own or error(wide) > EXACT, (cell, own)


def test_a_kl_in_the_reward_descends_that_of_whole_sequences() -> None:
    """On policy; one in the loss descends those of the states that were visited."""
    cell = Cell((), "reinforce", "seq-mean-token-sum-norm", False, "reward")
    case = replace(cell.case(), policies=Policies(ref=INF))
    without = replace(case, objective=case.objective.model_copy(update={"kl_coef": 0.0}))
    found, batch = gradient(case)[0] - gradient(without)[0], case.batch
    z = INF.log().requires_grad_()
    logp = (z.log_softmax(-1)[batch.states, batch.tokens] * batch.mask).sum(1)
    base = batch.at(case.policies.base).log().sum(1)
    kl = ((logp - logp.detach()).exp() * (logp - base)).mean()
    expected = -KL_COEF / 2 * torch.autograd.grad(kl, z)[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSS_SETTINGS)
def test_micro_batches_and_ranks_change_nothing(loss: str) -> None:
    for i, cell in enumerate(spread(loss)):
        judge_layouts(cell, [LAYOUTS[i % 2]])


@pytest.mark.parametrize("loss", LOSS_SETTINGS)
def test_a_fleet_of_two_kinds_is_exact_or_biased_as_declared(loss: str) -> None:
    """Two behaviour policies, each with its own list of corrections, in one batch."""
    for i, cell in enumerate(fleets(loss)):
        judge(cell)
        if i % 8 == 0:
            judge_layouts(cell, [LAYOUTS[i // 8 % 2]])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loss", LOSS_SETTINGS)
def test_every_pair_of_lists_of_two_kinds(loss: str) -> None:
    for cell in fleets(loss, every=True):
        judge(cell)


# corrections that neither weigh nor mask, as they are set here
NEUTRAL: dict[str, dict[str, Any]] = {"vcpo": {}, "opsm": {"delta": 1e9}}


@pytest.mark.parametrize("loss", ["ppo", "cispo", "reinforce"])
def test_a_correction_that_neither_weighs_nor_masks_changes_no_other_one(loss: str) -> None:
    """Under DVP it would, if asking for p_new moved the safe set that others are judged by."""
    named = {name: load_object(CORRECTIONS[name])(**s) for name, s in NEUTRAL.items()}
    for chosen in lists():
        cell = Cell(chosen, loss, "token-mean", True, "none")
        if "dvp" not in dict(chosen) or set(NEUTRAL) & set(dict(chosen)) or refusal(cell):
            continue
        case = cell.case()
        alone = gradient(case)[0]
        for name, spec in named.items():
            beside = replace(case, corrections={**case.corrections, name: spec})
            assert torch.equal(gradient(beside)[0], alone), (cell, name)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loss", LOSS_SETTINGS)
def test_every_cell_in_every_layout(loss: str) -> None:
    for cell in accepted(loss, ESTIMATORS, reverse=True):
        judge(cell)
        judge_layouts(cell, LAYOUTS)


def test_a_quarter_of_the_data_s_policy_gradients_are_those_found_now() -> None:
    rows = [("policy", r[0], "", *r[1:]) for r in grid_page.policy_rows(every=4)]
    text = grid_page.DATA.read_text(encoding="utf-8")
    lines = grid_page.written([*rows, *grid_page.refusals()]).splitlines()
    missing = [line for line in lines if line not in text.splitlines()]
    assert not missing, "run PYTHONPATH=tests python tests/corrections/grid_page.py"
    assert text.count("\nrefused,") == len(grid_page.refusals())
    assert grid_page.PAGE.read_text(encoding="utf-8") == grid_page.page(text)


def test_the_summary_of_the_grid_is_short() -> None:
    assert len(grid_page.PAGE.read_text(encoding="utf-8").split()) <= 1000


@pytest.mark.slow
def test_the_data_is_what_is_generated() -> None:
    assert grid_page.DATA.read_text(encoding="utf-8") == grid_page.data()


# ----- declarations -----


def specs_of(name: str) -> list[Any]:
    """A correction's specification as the grid has it, and with every other switch."""
    cls = load_object(CORRECTIONS[name])
    own = TIGHT.get(name, {})
    return [cls(**own), *(cls(**own, **{key: value}) for key, value in switches(name))]


DECLARED: dict[str, Any] = {
    **{f"loss={name}": (loss_class(name), loss_class(name).biases) for name in LOSSES},
    **{
        name: (load_object(CORRECTIONS[name]), [b for s in specs_of(name) for b in s.biases])
        for name in CORRECTIONS
    },
    **{
        f"advantage={name}": (advantage_class(name), advantage_class(name).biases)
        for name in ADVANTAGES
    },
    "kl": (ObjectiveSpec, ObjectiveSpec.kl_biases),
    "every term": (ObjectiveSpec, ObjectiveSpec.biases),
    "none": (Pipeline, (UNCORRECTED,)),
}


@pytest.mark.parametrize("name", DECLARED)
def test_docstrings_name_the_biases(name: str) -> None:
    cls, declared = DECLARED[name]
    text = " ".join((inspect.getdoc(cls) or "").split())
    assert all(bias.name in text for bias in declared), (text, declared)


ABOVE = ("advantage=", "every term")  # of these the tests above say so


@pytest.mark.parametrize("name", [name for name in DECLARED if not name.startswith(ABOVE)])
def test_a_declared_bias_is_real(name: str) -> None:
    """In some cell the gradient changes as it is opened."""
    unseen = set(map(str, DECLARED[name][1]))
    for cell in cells():
        loss = "loss=" + cell.loss.partition("(")[0]
        mine = name in (loss, "kl", "none") or name in dict(cell.chosen)
        if len(cell.chosen) > 1 or not mine or (cell.kl != "none") != (name == "kl"):
            continue
        if not unseen or refusal(cell):
            continue
        for bias in biases(cell.case()):
            if str(bias) in unseen and is_real(cell, bias):
                unseen.remove(str(bias))
    assert not unseen


def is_real(cell: Cell, bias: Bias) -> bool:
    case = cell.case()
    if bias.where:  # opened by other policies, whose gradient is another: so all others are opened
        others = [own for own in biases(case) if own != bias]
        return error(opened(case, others)) > EXACT
    return distance(gradient(opened(case, [bias]))[0], gradient(case)[0]) > EXACT


def test_ais_lies_between_no_correction_and_tis() -> None:
    for later, loss in ((False, "ppo"), (True, "reinforce")):
        none, ais, tis = (
            gradient(Cell(chosen, loss, "token-mean", later, "none").case())[0].flatten()
            for chosen in ((), (("ais", ()),), (("tis", ()),))
        )
        alpha = torch.dot(ais - none, tis - none) / (tis - none).square().sum()
        assert 0.5 < alpha < 0.99
        torch.testing.assert_close(ais, none + alpha * (tis - none), atol=1e-8, rtol=1e-6)


def test_the_grid_would_see_weights_that_lead_to_the_wrong_policy() -> None:
    """REINFORCE's weights led to p_ref once: wrong from a phase's second step on."""
    cell = Cell((("tis", ()),), "reinforce", "token-mean", True, "none")
    judge(cell)
    with patch.object(pipeline, "loss_class", lambda _: loss_class("ppo")):
        case = cell.case()
        assert error(opened(case, biases(case)), ranks=1) > 0.01
