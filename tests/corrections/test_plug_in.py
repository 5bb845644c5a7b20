"""Corrections by name on two log-probs a token: each equals its formula, the rest is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlcore.corrections import functional as F
from rlcore.corrections.plug_in import NAMES, Corrector, group_advantages
from rlcore.corrections.specs import CORRECTIONS
from rlcore.errors import UserError


def batch(rows=6, tokens=5, seed=0):
    """(logp_inf, logp_ref, mask, advantages, groups): ratios from 0.05 to 20, rows of unlike
    lengths."""
    rng = torch.Generator().manual_seed(seed)
    inf = -3 * torch.rand(rows, tokens, generator=rng) - 0.1
    ref = (inf + torch.randn(rows, tokens, generator=rng)).clamp(max=-1e-3)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=rng)
    mask = torch.arange(tokens) < lengths[:, None]
    gains = torch.randn(rows, generator=rng)
    return inf, ref, mask, gains, torch.arange(rows) // 2


def of(name, **settings):
    inf, ref, mask, gains, groups = batch()
    return Corrector({name: settings})(inf, ref, mask, gains, groups)


def test_weights_are_those_of_the_formulas():
    inf, ref, mask, gains, _ = batch()
    a = gains[:, None].expand_as(ref)
    expected = {
        "tis": F.tis(ref, inf, mask, cap=1.5),
        "mis": F.mis(ref, inf, mask, low=0.5, high=2.0),
        "ais": F.ais(ref, inf, a, mask)[0],
    }
    settings = {"tis": {"cap": 1.5}, "mis": {"low": 0.5, "high": 2.0}, "ais": {}}
    for name, weight in expected.items():
        found = of(name, **settings[name])
        torch.testing.assert_close(found.weight[mask], weight[mask])
        assert (found.weight[~mask] == 0).all() and found.weight.dtype == torch.float32


def test_what_leaves_has_weight_0_and_lists_combine():
    inf, ref, mask, gains, _ = batch()
    keep = F.veto(ref, inf, mask, threshold=0.5)
    assert 0 < keep.sum() < len(keep)  # the example has both
    found = Corrector({"tis": {"cap": 1.5}, "veto": {"threshold": 0.5}})(inf, ref, mask, gains)
    on = mask & keep[:, None]
    assert torch.equal(found.mask, on)
    torch.testing.assert_close(found.weight[on], F.tis(ref, inf, mask, cap=1.5)[on])
    assert (found.weight[~on] == 0).all()


class Together:
    """A sum over two processes, which threads stand for."""

    def __init__(self):
        self._wait, self._given = threading.Barrier(2, timeout=30), [None, None]

    def of(self, n):
        def reduce(values):
            self._given[n] = values
            self._wait.wait()
            total = self._given[0] + self._given[1]
            self._wait.wait()
            return total

        return reduce


@pytest.mark.parametrize("name", NAMES)
def test_a_process_s_part_of_a_batch_is_weighed_as_in_the_whole(name):
    own = {"outliers": {"threshold": 0.5}, "opsm": {"delta": 0.1}, "veto": {"threshold": 0.5}}.get(
        name, {}
    )
    given, together = batch(rows=12), Together()
    whole = Corrector({name: own})(*given)
    assert (whole.weight != given[2]).any()  # it acts on the example

    def part(n):
        half = slice(6 * n, 6 * n + 6)
        return Corrector({name: own}, together.of(n))(*(tensor[half] for tensor in given))

    with ThreadPoolExecutor(2) as threads:
        parts = list(threads.map(part, (0, 1)))
    torch.testing.assert_close(torch.cat([found.weight for found in parts]), whole.weight)
    assert torch.equal(torch.cat([found.mask for found in parts]), whole.mask)


@pytest.mark.parametrize("name", [*sorted({*CORRECTIONS} - {*NAMES}), "nonsense"])
def test_the_others_are_refused_in_a_sentence(name):
    with pytest.raises(UserError, match=rf"^correction={name} is not accepted: .*choose one of"):
        Corrector({name: {}})


@pytest.mark.parametrize(
    ("name", "own", "said"),
    [
        ("tis", {"cap": 0.5}, r"correction\.tis\.cap"),
        ("tis", {"cup": 2}, r"correction\.tis\.cup"),
        ("outliers", {}, r"correction\.outliers\.threshold"),
        ("mis", {"low": 2.0, "high": 1.0}, r"correction\.mis"),
    ],
)
def test_wrong_settings_are_refused_with_their_key(name, own, said):
    with pytest.raises(UserError, match=rf"^{said}"):
        Corrector({name: own})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", ["logp_inf", "logp_ref", "advantages"])
def test_a_number_that_is_not_finite_costs_its_row_at_most(name, which):
    own = {"outliers": {"threshold": 0.5}, "opsm": {"delta": 0.1}}.get(name, {})
    given = [tensor.clone() for tensor in batch()]
    place = {"logp_inf": 0, "logp_ref": 1, "advantages": 3}[which]
    row = int(given[2].sum(-1).argmax())
    given[place][row] = float("nan")
    found = Corrector({name: own})(*given)
    assert torch.isfinite(found.weight).all()
    assert all(value == value for value in found.metrics.values())
    others = [i for i in range(len(given[2])) if i != row]
    rest = Corrector({name: own})(*(tensor[others] for tensor in given))
    if which == "advantages":  # the row leaves, as if it had not been there
        torch.testing.assert_close(found.weight[others], rest.weight)
        assert not found.mask[row].any() and not found.weight[row].any()


def test_advantages_of_a_group_are_centred():
    found = group_advantages(torch.tensor([1.0, 0.0, 3.0, 5.0]), torch.tensor([7, 7, 2, 2]))
    assert found.tolist() == [0.5, -0.5, -1.0, 1.0]
    broken = torch.tensor([1.0, float("nan"), 3.0, 5.0])
    found = group_advantages(broken, torch.tensor([7, 7, 7, 2]))
    assert found[[0, 2, 3]].tolist() == [-1.0, 1.0, 0.0] and found[1].isnan()
