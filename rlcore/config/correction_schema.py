"""Settings of each correction. The order in which a run names them is the order in which they apply."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_serializer,
    model_validator,
)


class Strict(BaseModel):
    """Unknown keys are refused, infinities too; values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Tis(Strict):
    cap: float = Field(default=2.0, ge=1, description="C: weights are min(p_ref/p_inf, C)")
    level: Literal["token", "sequence"] = Field(default="token", description="of the ratio")
    adjusted: bool = Field(default=False, description="min(SG(p_new)/p_inf, C), inner clip off (Jackpot B.1)")


class Mis(Strict):
    low: float = Field(default=0.5, ge=0, le=1, description="ratios below weigh 0")
    high: float = Field(default=2.0, ge=1, description="ratios above weigh 0")
    level: Literal["token", "sequence", "geometric"] = Field(default="token", description="of the ratio")


class IcePop(Strict):
    low: float = Field(default=0.5, ge=0, le=1, description="ratios below weigh 0")
    high: float = Field(default=5.0, ge=1, description="ratios above weigh 0")


class Veto(Strict):
    threshold: float = Field(default=1e-4, gt=0, lt=1, description="a token with p_ref/p_inf below drops its sequence")


class Jackpot(Strict):
    mode: Literal["mask", "reweight", "both"] = Field(default="both", description="reject tokens, weigh them, or both")
    target: Literal["ref", "new"] = Field(default="ref", description="p_t: ref without staleness, new with it")
    lam: float = Field(default=1.0, gt=0, description="lambda: accept with min(1, p_t/(lambda p_inf))")
    c1: float = Field(default=3.0, ge=1, description="cap of Z * max(lambda, p_t/p_inf)")
    c2: float = Field(default=3.0, ge=1, description="cap of p_ref/p_new, target new")
    alpha_hat: Literal["bernoulli", "expected"] = Field(
        default="expected", description="the accepted share: drawn, or its expectation"
    )
    missing: Literal["zero", "bound"] = Field(default="zero", description="p_inf of tokens the actor did not return")
    tail: Literal["none", "residual"] = Field(default="residual", description="mass outside the stored top k")
    short_circuit: bool = Field(default=False, description="switch the inner PPO clip off, as TIS-adjusted does")


class Ais(Strict):
    cap: float = Field(default=5.0, ge=1, description="C: w = min(p_ref/p_inf, C)")
    delta: float = Field(default=0.02, gt=0, description="mean |dlogp| at which the correction is full")
    gamma: float = Field(default=1.2, gt=0, description="growth of std(A*w)/std(A) that is tolerated")
    beta: float = Field(default=1.0, ge=0, description="how much more growth damps the correction")
    eps: float = Field(default=1e-6, gt=0, description="guards a division")


class Dvp(Strict):
    rho: float = Field(default=exp(-13.0), gt=0, lt=1, description="safe set: p >= rho * max p")


class Rapid(Strict):
    eta: float = Field(default=2.0, ge=1, description="cap of the sequence weight")
    leave_one_out: bool = Field(default=False, description="leave a sample out of its own baseline")


class CorrectionsConfig(Strict):
    """Keys present are on, and apply in the order in which the run named them (kept through YAML and back)."""

    tis: Tis | None = None
    mis: Mis | None = None
    icepop: IcePop | None = None
    veto: Veto | None = None
    jackpot: Jackpot | None = None
    ais: Ais | None = None
    dvp: Dvp | None = None
    rapid: Rapid | None = None
    none: dict[str, Any] | None = Field(
        default=None, max_length=0, description="present when a run says correction=none"
    )

    _order: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, data: Any, handler: ModelWrapValidatorHandler[CorrectionsConfig]) -> CorrectionsConfig:
        config = handler(data)
        if isinstance(data, Mapping):
            config._order = tuple(name for name in data if getattr(config, name) is not None)
        return config

    @model_serializer(mode="plain")
    def _in_order(self) -> dict[str, Any]:
        return {"none": {}} if self._order == ("none",) else self.chosen()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name the run gave, "none" included, in order."""
        return self._order

    def chosen(self) -> dict[str, dict[str, Any]]:
        """name -> plain keyword arguments, in the order in which they were named; empty for none."""
        return {name: getattr(self, name).model_dump() for name in self._order if name != "none"}
