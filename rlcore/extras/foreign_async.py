"""Asynchronous forms of the other trainers, as schedules of ours: how many steps a publication lies
after the one before (H), and how far samples may lag behind (eta). No torch."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from rlcore.extras.foreign_translator import Translator

V1_MODES = ("colocate_async", "separate_async")


class Lag(NamedTuple):
    """How a trainer lets samples age. Example: Lag(eta=4, publish=2, in_flight=True)"""

    eta: int  # optimizer steps
    publish: int | None = None  # H, where it is not the batch of a phase over that of a step
    in_flight: bool = True  # running samples go on under new weights


def lag_of(t: Translator, steps: int) -> Lag | None:
    """The asynchronous form that a file asks for, or None; `steps`: of a rollout phase."""
    forms = {
        "verl": _verl,
        "trl": _trl,
        "openrlhf": _openrlhf,
        "skyrl": _skyrl,
        "prime_rl": _prime_rl,
    }
    return forms[t.source](t, steps)


def _verl(t: Translator, steps: int) -> Lag | None:
    """verl: the fully asynchronous program, the one that is a phase behind, and modes of V1."""
    name = "async_training."
    if any(key.startswith(name) for key in t.given):
        batches = t.number(f"{name}require_batches", 1)
        publish = int(t.number(f"{name}trigger_parameter_sync_step", 4) * batches)
        threshold = t.number(f"{name}staleness_threshold", 0.1)
        partial = str(t.given.get(f"{name}partial_rollout", True)).lower() == "true"
        # the threshold is the share of a publication's samples that may be left over from before
        return Lag(ceil(threshold * publish), publish, partial and threshold > 0)
    if t.on("$one_step_off"):
        return Lag(steps, in_flight=False)
    mode = str(t.given.get("trainer.v1.trainer_mode", "sync"))
    if mode not in V1_MODES:
        return None
    publish = int(t.number(f"trainer.v1.{mode}.parameter_sync_step", steps))
    versions = t.number("trainer.v1.sampler.max_off_policy_threshold", 8)
    return Lag(int(versions * publish), publish)


def _trl(t: Translator, steps: int) -> Lag | None:
    """TRL's asynchronous trainer counts publications."""
    if "max_staleness" not in t.given:
        return None
    publish = int(t.number("weight_sync_steps", 1))
    return Lag(int(t.number("max_staleness", 4)) * publish, publish)


def _openrlhf(t: Translator, steps: int) -> Lag | None:
    """A queue of rollout batches between sampler and trainer."""
    if not t.on("train.async_enable"):
        return None
    queue = int(t.number("train.async_queue_size", 1))
    return Lag(queue * steps, in_flight=t.on("train.partial_rollout_enable"))


def _skyrl(t: Translator, steps: int) -> Lag | None:
    if t.on("$one_step_off"):
        return Lag(steps, in_flight=False)
    if not t.on("trainer.fully_async.enabled"):
        return None
    return Lag(int(t.number("trainer.fully_async.max_staleness_steps", 4)))


def _prime_rl(t: Translator, steps: int) -> Lag | None:
    return Lag(int(t.number("orchestrator.max_off_policy_steps", 8)))


def schedule(t: Translator, steps: int) -> None:
    """Choose the schedule, and how old samples may be."""
    lag = lag_of(t, steps)
    bound = t.name("schedule.max_staleness")
    if "$" in str(t.given.get(bound)):
        t.leave(bound, "holds a variable: give schedule.max_staleness")
    if lag is not None and lag.eta > 0:
        t.options["schedule"] = "async"
        t.values["schedule.max_staleness"] = lag.eta
        t.values["schedule.on_publish"] = "in_flight" if lag.in_flight else "finish"
    publish = steps if lag is None or lag.publish is None else lag.publish
    if t.source == "verl" and any(key.startswith("async_training.") for key in t.given):
        # This program counts publications (fully_async_trainer.py: current_param_version), also for
        # trainer.test_freq, which until January 2026 was rollout.test_freq.
        if (every := t.number("rollout.test_freq", 0)) > 0:
            t.values["evaluation.every"] = int(every)
        for key in ("evaluation.every", "checkpoint.every"):
            if key in t.values:
                t.values[key] = int(t.values[key]) * publish
    if publish > 1:
        t.values["schedule.steps_per_publish"] = publish
        if t.options["schedule"] != "async":
            t.options["schedule"] = "large_batch"


def ratio(t: Translator) -> bool:
    """True, and `algorithm.ratio_to=p_inf`, where the trainer divides by the sampler's
    probabilities and holds no others."""
    correction = "algorithm.rollout_correction."
    bypass = t.on(f"{correction}bypass_mode")
    if t.source == "verl" and bypass and t.given.get(f"{correction}loss_type") == "reinforce":
        t.leave(f"{correction}loss_type", "algorithm.loss=reinforce with a correction is nearest")
        return False
    if not bypass and not (t.source == "trl" and "max_staleness" in t.given):
        return False
    t.values["algorithm.ratio_to"] = "p_inf"
    return True
