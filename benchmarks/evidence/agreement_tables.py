"""The rows of `agreement.py`: what is said of the responses of one kind of actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.evidence.drawn import Drawn
from benchmarks.evidence.jackpot_normaliser import estimates
from rlcore.corrections.ais import AisSpec
from rlcore.corrections.dppo import DppoSpec
from rlcore.corrections.dvp import OUTSIDE_LOGP, DvpSpec
from rlcore.corrections.jackpot import JackpotSpec
from rlcore.corrections.mis import IcePopSpec, MisSpec
from rlcore.corrections.numerics import ONE_RANK
from rlcore.corrections.pipeline import build
from rlcore.corrections.rapid import RapidSpec
from rlcore.corrections.specs import CorrectionSpec
from rlcore.corrections.tis import TisSpec
from rlcore.corrections.vcpo import VcpoSpec
from rlcore.corrections.veto import VetoSpec
from rlcore.objectives.advantages import over_tokens, sequence_advantages
from rlcore.objectives.specs import ObjectiveSpec, make_advantage
from rlcore.types import StepTensors

Corrections = dict[str, CorrectionSpec]
#: of these the share of tokens that stay in the loss with a weight above 0 is shown
KEEPING: dict[str, Corrections] = {
    "mis": {"mis": MisSpec()},
    "mis, sequence": {"mis": MisSpec(level="sequence")},
    "mis, geometric": {"mis": MisSpec(level="geometric")},
    "icepop": {"icepop": IcePopSpec()},
    "veto": {"veto": VetoSpec()},
    "jackpot": {"jackpot": JackpotSpec()},
    "dppo": {"dppo": DppoSpec()},
    "dvp+mis+veto": {"dvp": DvpSpec(), "mis": MisSpec(), "veto": VetoSpec()},
}
#: of these the share that a cap truncates
CAPPING: dict[str, tuple[Corrections, str]] = {
    "tis": ({"tis": TisSpec()}, "correction/tis/truncated_share"),
    "tis, sequence": ({"tis": TisSpec(level="sequence")}, "correction/tis/truncated_share"),
    "jackpot": ({"jackpot": JackpotSpec()}, "correction/jackpot/truncated_share"),
    "rapid": ({"rapid": RapidSpec()}, "correction/rapid/clipped_share"),
}


def step_tensors(drawn: Drawn, *, k: int = 20, constrained: bool = False) -> StepTensors:
    """What corrections see of a step on these responses, before any was trained on.

    `constrained`: as under DVP, whose actor does not draw what lies outside its own safe set, and
    whose learner gives no probability to what lies outside its own.
    """
    d = drawn
    mask, logp_inf, logp_ref = d.mask, d.logp_inf, d.logp_ref
    inside = coverage = None
    if constrained:
        mask = mask & d.inside_inf
        logp_inf = logp_inf - d.coverage_inf.log()
        logp_ref = (logp_ref - d.coverage_ref.log()).where(d.inside_ref, OUTSIDE_LOGP)
        inside, coverage = d.inside_ref, d.coverage_ref
    advantage = sequence_advantages(
        make_advantage(ObjectiveSpec()), d.rewards, d.group_ids, ONE_RANK, mask.sum(-1)
    )
    return StepTensors(
        mask=mask,
        logp_inf=logp_inf,
        logp_ref=logp_ref,
        logp_new=logp_ref.clone(),
        rewards=d.rewards,
        group_ids=d.group_ids,
        advantages=over_tokens(advantage, mask),
        token_version=torch.zeros_like(d.ids, dtype=torch.int32),
        sample_ids=torch.arange(len(mask)),
        step=0,
        topk_ids_inf=d.inf_ids[..., :k],
        topk_logp_inf=d.inf_logp[..., :k],
        ref_topk_ids=d.ref_ids[..., :k],
        ref_topk_logp=d.ref_logp[..., :k],
        ref_logp_at_inf_ids=d.ref_at_inf[..., :k],
        new_topk_ids=d.ref_ids[..., :k],
        new_topk_logp=d.ref_logp[..., :k],
        new_logp_at_inf_ids=d.ref_at_inf[..., :k],
        ref_inside=inside,
        new_inside=inside,
        coverage=coverage,
    )


def corrected(step: StepTensors, corrections: Corrections) -> dict[str, float]:
    """Metrics of the mismatch and of a list of corrections, with the losses they go with."""
    loss = "reinforce" if any(c.leads_to_new for c in corrections.values()) else "ppo"
    return build(corrections, 0, ObjectiveSpec(loss=loss)).correct(step, ONE_RANK).metrics


def agreement(name: str, drawn: Drawn) -> dict[str, Any]:
    """Table 1: distance of the two policies; "exact" is over the whole vocabulary."""
    found = corrected(step_tensors(drawn), {})
    on = drawn.mask
    return {
        "actor": name,
        "tokens": int(on.sum()),
        "KL, exact": float(drawn.kl[on].mean()),
        "KL, k3": found["mismatch/kl_k3"],
        "ESS": found["mismatch/ess"],
        "mean abs dlogp": found["mismatch/abs_dlogp_mean"],
        "max abs dlogp": found["mismatch/abs_dlogp_max"],
        "acceptance, exact": float(drawn.z[on].mean()),
        "outside the safe set": float((~drawn.inside_ref)[on].float().mean()),
        "mass outside": float(drawn.outside[on].mean()),
    }


def worst(drawn: Drawn, tokenizer: Any, count: int = 3) -> str:
    """The tokens of largest |dlogp|: text, and probability under p_inf and p_ref."""
    gap = (drawn.logp_ref - drawn.logp_inf).abs().where(drawn.mask, -1.0).flatten()
    shown = []
    for i in gap.topk(min(count, int(drawn.mask.sum()))).indices.tolist():
        text = repr(tokenizer.decode([int(drawn.ids.flatten()[i])])).replace("|", r"\|")
        inf, ref = (float(x.flatten()[i].exp()) for x in (drawn.logp_inf, drawn.logp_ref))
        shown.append(f"`{text}` {inf:.2g} to {ref:.2g}")
    return "; ".join(shown)


def kept(name: str, drawn: Drawn) -> dict[str, Any]:
    """Table 3: share of the tokens that each correction leaves in the loss."""
    row: dict[str, Any] = {"actor": name}
    for label, corrections in KEEPING.items():
        step = step_tensors(drawn, constrained="dvp" in corrections)
        found = corrected(step, corrections)
        row[label] = found["correction/kept_share"] * (1 - found["correction/zero_weight_share"])
    return row


def capped(name: str, drawn: Drawn) -> dict[str, Any]:
    """Table 4: share of the tokens (RAPID: of the sequences) that a cap truncates; AIS, VCPO."""
    step = step_tensors(drawn)
    row: dict[str, Any] = {"actor": name}
    for label, (corrections, key) in CAPPING.items():
        row[label] = corrected(step, corrections)[key]
    ais = corrected(step, {"ais": AisSpec()})
    for signal in ("alpha_ess", "alpha_mis", "alpha_var", "alpha"):
        row[f"ais {signal}"] = ais[f"correction/ais/{signal}"]
    row["vcpo step scale"] = corrected(step, {"vcpo": VcpoSpec()})["correction/vcpo/step_scale"]
    return row


def safe_set(name: str, drawn: Drawn) -> dict[str, Any]:
    """Table 5: DVP's coverage, and what it and the veto take out."""
    found = corrected(step_tensors(drawn, constrained=True), {"dvp": DvpSpec(), "veto": VetoSpec()})
    plain = corrected(step_tensors(drawn), {"veto": VetoSpec()})
    on = drawn.mask
    return {
        "actor": name,
        "coverage, mean": found["correction/dvp/coverage_mean"],
        "coverage, least": found["correction/dvp/coverage_min"],
        "drawn outside the actor's set": _share(~drawn.inside_inf, on),
        "of DVP's tokens outside the learner's": found["correction/dvp/outside_share"],
        "of its sequences": found["correction/dvp/sequence_outside_share"],
        "vetoed sequences, no DVP": plain["correction/veto/vetoed_share"],
        "vetoed sequences, DVP": found["correction/veto/vetoed_share"],
    }


def normaliser(drawn: Drawn, k: int) -> dict[str, float]:
    """Table 6: mean error of Jackpot's Z over the top k by tail/missing; * after calibration."""
    rows = estimates(drawn, [k], 1.0)
    raw = {f"{r['tail']}/{r['missing']}": r["mean |Z_k - Z|"] for r in rows}
    return raw | {f"{r['tail']}/{r['missing']} *": r["calibrated: mean"] for r in rows}


def winners(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """How many rows of `normaliser` each estimate is closest in (ties count for all), raw and
    calibrated, and its mean error over the rows."""
    out = []
    for star in ("", " *"):
        names = [name for name in rows[0] if name.endswith(" *") == bool(star)]
        for name in names:
            first = sum(row[name] <= min(row[n] for n in names) for row in rows)
            mean = sum(row[name] for row in rows) / len(rows)
            out.append({"estimate": name, "closest in": first, "of": len(rows), "mean error": mean})
    return out


def _share(what: Tensor, on: Tensor) -> float:
    return float(what[on].float().mean())
