"""Settings of each correction. The order in which a run names them is the order in which they apply."""

from __future__ import annotations

from math import exp
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tis(Strict):
    cap: float = Field(2.0, gt=0)
    level: Literal["token", "sequence"] = "token"
    adjusted: bool = Field(False, description="min(SG(p_new)/p_inf, C), inner clip off (Jackpot B.1)")


class Mis(Strict):
    low: float = Field(0.5, ge=0)
    high: float = Field(2.0, gt=0)
    level: Literal["token", "sequence", "geometric"] = "token"


class IcePop(Strict):
    low: float = Field(0.5, ge=0)
    high: float = Field(5.0, gt=0)


class Veto(Strict):
    threshold: float = Field(1e-4, gt=0, lt=1)


class Jackpot(Strict):
    mode: Literal["mask", "reweight", "both"] = "both"
    target: Literal["ref", "new"] = "ref"
    lam: float = Field(1.0, gt=0)
    c1: float = Field(3.0, gt=0)
    c2: float = Field(3.0, gt=0)
    alpha_hat: Literal["bernoulli", "expected"] = "expected"
    missing: Literal["zero", "bound"] = "zero"
    tail: Literal["none", "residual"] = "residual"
    short_circuit: bool = Field(False, description="switch the inner PPO clip off, as TIS-adjusted does")


class Ais(Strict):
    cap: float = Field(5.0, gt=0)
    delta: float = Field(0.02, gt=0)
    gamma: float = Field(1.2, gt=0)
    beta: float = Field(1.0, ge=0)
    eps: float = Field(1e-6, gt=0)


class Dvp(Strict):
    rho: float = Field(exp(-13.0), gt=0, lt=1)


class Rapid(Strict):
    eta: float = Field(2.0, gt=0)
    leave_one_out: bool = False


class CorrectionsConfig(Strict):
    """Keys present are on; `names` keeps the order in which the run named them."""

    tis: Tis | None = None
    mis: Mis | None = None
    icepop: IcePop | None = None
    veto: Veto | None = None
    jackpot: Jackpot | None = None
    ais: Ais | None = None
    dvp: Dvp | None = None
    rapid: Rapid | None = None
    none: dict[str, Any] | None = Field(None, description="present when a run says correction=none")

    def chosen(self) -> dict[str, dict[str, Any]]:
        """name -> plain keyword arguments, in the order in which they were named."""
        ordered = [n for n in self.model_fields_set if n != "none" and getattr(self, n) is not None]
        return {n: getattr(self, n).model_dump() for n in ordered}
