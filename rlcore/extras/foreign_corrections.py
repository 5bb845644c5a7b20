"""Corrections of the other trainers, as ours. No torch."""

from __future__ import annotations

from typing import Any

from rlcore.extras.foreign_async import ratio
from rlcore.extras.foreign_keys import SKY_LOSS
from rlcore.extras.foreign_translator import Translator

_VERL = "algorithm.rollout_correction."
_SKY = f"{SKY_LOSS}.off_policy_correction."
_REJECTIONS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_REJECTIONS |= {level: level for level in _REJECTIONS.values()}  # older names


def correction(t: Translator) -> None:
    """Choose `correction=[...]` with its settings."""
    chosen: dict[str, dict[str, Any]] = {}
    if ratio(t):
        nearest = "correction=[mis] with algorithm.ratio_to=p_ref is nearest"
        unread = "unread there, as bypass_mode has the ratio to the sampler in the loss"
        for name, why in (("rollout_is", unread), ("rollout_rs", nearest)):
            if t.source == "verl" and t.given.get(_VERL + name):
                t.leave(_VERL + name, why)
    else:
        how = {
            "verl": _verl_weights,
            "trl": _trl_weights,
            "openrlhf": _openrlhf_weights,
            "skyrl": _skyrl_weights,
            "prime_rl": _prime_masks,
        }[t.source]
        chosen |= how(t)
        masks = _rejections(t) if t.source == "verl" else {}
        masks |= _sky_masks(t) if t.source == "skyrl" else {}
        if chosen and masks:
            name = f"{_VERL}rollout_rs" if t.source == "verl" else f"{_SKY}sequence_mask_metric"
            t.leave(name, f"correction=[{', '.join(masks)}] in place of {', '.join(chosen)} has it")
        chosen = chosen or masks
    if t.name("correction.opsm.delta") and t.theirs("correction.opsm.delta") is not None:
        chosen["opsm"] = {"delta": t.theirs("correction.opsm.delta")}
    for name, settings in chosen.items():
        t.values |= {f"correction.{name}.{key}": value for key, value in settings.items()}
    t.options["correction"] = list(chosen) or ["none"]


def _bounds(threshold: Any) -> list[float]:
    """Numbers of "0.5_5.0", of a list, or of one number."""
    parts = threshold if isinstance(threshold, list) else str(threshold).split("_")
    try:
        return [float(part) for part in parts]
    except ValueError:
        return []


def _weights(t: Translator, level: str, threshold: Any, default: float) -> dict[str, Any]:
    """TIS by one bound; with two, weights outside of which are 0: IcePop, or MIS of sequences."""
    bounds = _bounds(threshold) or [default]
    if level not in ("token", "sequence"):
        t.leave(t.name("correction.tis.level"), "no counterpart: choose a correction")
        return {}
    if len(bounds) == 1:
        return {"tis": {"level": level, "cap": bounds[0]}}
    low, high = bounds
    if level == "token":
        return {"icepop": {"low": low, "high": high}}
    return {"mis": {"level": level, "low": low, "high": high}}


def _verl_weights(t: Translator) -> dict[str, Any]:
    if t.on(f"{_VERL}rollout_is_batch_normalize"):
        t.leave(f"{_VERL}rollout_is_batch_normalize", "correction.tis.normalised=true has it")
    level = t.given.get(f"{_VERL}rollout_is")
    if level is None:
        return {}
    return _weights(t, str(level).lower(), t.given.get(f"{_VERL}rollout_is_threshold", 2.0), 2.0)


def _rejections(t: Translator) -> dict[str, Any]:
    """verl's rejection by the log-ratio is MIS; by other divergences it has no counterpart."""
    modes = str(t.given.get(f"{_VERL}rollout_rs") or "")
    if not modes:
        return {}
    bounds = _bounds(t.given.get(f"{_VERL}rollout_rs_threshold"))
    if modes not in _REJECTIONS or not bounds:
        t.leave(f"{_VERL}rollout_rs", "no counterpart: correction=[mis] masks by the ratio")
        return {}
    low, high = bounds if len(bounds) == 2 else (1 / bounds[0], bounds[0])
    return {"mis": {"level": _REJECTIONS[modes], "low": low, "high": high}}


def _trl_weights(t: Translator) -> dict[str, Any]:
    """TRL's modes; where none is given, sequences above 3 are masked."""
    if not t.on("use_vllm") or t.given.get("vllm_importance_sampling_correction") is False:
        return {}
    cap = t.theirs("correction.tis.cap") or 3.0
    level, _, kind = str(t.theirs("correction.tis.level", "sequence_mask")).lower().partition("_")
    if kind == "mask" and level in ("token", "sequence"):
        return {"mis": {"level": level, "low": 0.0, "high": cap}}
    return _weights(t, level, cap, 3.0)


def _openrlhf_weights(t: Translator) -> dict[str, Any]:
    if not t.on("algo.advantage.is_correction_enable"):
        return {}
    kind = str(t.theirs("correction.tis.level", "tis")).lower()
    bounds = _bounds(t.theirs("correction.tis.cap", [0.5, 5.0])) or [0.5, 5.0]
    low, high = bounds if len(bounds) == 2 else (0.5, bounds[0])
    if kind == "tis":
        return {"tis": {"level": "token", "floor": low, "cap": high}}
    if kind == "icepop":
        return {"icepop": {"low": low, "high": high}}
    if kind == "seq-mask-tis":  # by the geometric mean; kept answers carry their tokens' ratios
        t.leave(t.name("correction.tis.level"), "kept answers are weighed by token there, too")
        return {"mis": {"level": "geometric", "low": low, "high": high}}
    t.leave(t.name("correction.tis.level"), "no counterpart: choose a correction")
    return {}


def _skyrl_weights(t: Translator) -> dict[str, Any]:
    level = t.given.get(f"{_SKY}tis_ratio_type")
    if level is None:
        return {}
    level = str(level).lower()
    cap = t.number(f"{_SKY}{level}_tis_ratio_clip_high", 5.0 if level == "sequence" else 2.0)
    return _weights(t, level, cap, cap)


def _sky_masks(t: Translator) -> dict[str, Any]:
    found: dict[str, Any] = {}
    metric = str(t.given.get(f"{_SKY}sequence_mask_metric") or "")
    if metric in ("geometric", "product"):
        short, low, high = ("geo", 0.99, 1.01) if metric == "geometric" else ("product", 0.5, 2.0)
        found["mis"] = {
            "level": "geometric" if metric == "geometric" else "sequence",
            "low": t.number(f"{_SKY}{short}_mask_low", low),
            "high": t.number(f"{_SKY}{short}_mask_high", high),
        }
    if t.given.get(f"{_SKY}token_mask_is_threshold_high") is not None:
        found["icepop"] = {
            "low": t.number(f"{_SKY}token_mask_is_threshold_low", 0.0),
            "high": t.number(f"{_SKY}token_mask_is_threshold_high", 2.0),
        }
    return found


def _prime_masks(t: Translator) -> dict[str, Any]:
    if t.given["trainer.loss.type"] != "default":
        return {}
    return {
        "dppo": {side: t.number(f"trainer.loss.dppo_mask_{side}", 0.2) for side in ("low", "high")}
    }
