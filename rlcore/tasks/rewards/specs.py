"""Settings of the rewards that a task has besides its own grader. No torch, no HTTP client."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import model_validator

from rlcore.errors import UserError
from rlcore.spec import Spec, refuse, setting

OWN = "task"  # what the reward of the task's own grader is called among the parts
LABEL = re.compile(r"[a-z][a-z0-9_]*")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
SECRET = re.compile(r"key|token|secret|password|^sig$", re.IGNORECASE)


class EndpointSpec(Spec):
    """The address of requests, and the treatment of failed ones."""

    url: str = setting(meaning="http:// or https:// address that requests are sent to")
    api_key_env: str | None = setting(
        None, "NAME of the environment variable whose value is sent as bearer token"
    )
    concurrency: int = setting(4, "requests under way at a time", gt=0)
    request_timeout_s: float = setting(30.0, "deadline of one request", unit="s", gt=0)
    deadline_s: float = setting(
        120.0, "deadline of a request and all its retries together", unit="s", gt=0
    )
    retries: int = setting(3, "after no answer, a broken one, or status 408, 425, 429 or 5xx", ge=0)
    retry_wait_s: float = setting(
        1.0, "before the first retry; doubles, and is at least Retry-After", unit="s", gt=0
    )
    breaker_failures: int = setting(
        5, "failed requests in a row, retries used up, that open the circuit breaker", gt=0
    )
    breaker_rest_s: float = setting(
        30.0,
        "how long an open circuit breaker fails samples at once, before one request is tried",
        unit="s",
        gt=0,
    )

    @model_validator(mode="before")
    @classmethod
    def _holds_no_secret(cls, data: Any) -> Any:
        """Refuse a text that looks like a secret. This is a validator, not `check`, so that no
        other message can show the value."""
        if not isinstance(data, dict):
            return data
        name, url = data.get("api_key_env"), data.get("url")
        if name is not None and not (isinstance(name, str) and VARIABLE.fullmatch(name)):
            raise UserError(
                "rewards.*.api_key_env is not the name of an environment variable: give its NAME "
                "(capital letters, digits, _) and never the key, which config.yaml would hold."
            )
        if isinstance(url, str) and _holds_credentials(url):
            raise UserError(
                "rewards.*.url holds credentials, which config.yaml would show: leave them out and "
                "name the environment variable that holds the key with api_key_env."
            )
        return data

    def check(self, key: str) -> None:
        super().check(key)
        parts = urlsplit(self.url)
        refuse(
            parts.scheme not in ("http", "https") or not parts.hostname,
            f"{key}.url={self.url} is not accepted: give http://HOST:PORT/PATH or https://...",
        )
        refuse(
            self.request_timeout_s > self.deadline_s,
            f"{key}.request_timeout_s={self.request_timeout_s:g} is above "
            f"{key}.deadline_s={self.deadline_s:g}, which ends the request first: lower the first "
            "or raise the second.",
        )


def _holds_credentials(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return "@" in parts.netloc or any(SECRET.search(name) for name, _ in parse_qsl(parts.query))
    except ValueError:  # not an address at all, which `check` says
        return False


class BatchedSpec(EndpointSpec):
    """An endpoint whose requests hold several samples."""

    batch_size: int = setting(32, "samples of one request, at most", gt=0)
    batch_wait_s: float = setting(
        0.05, "how long a request that is not full waits for more samples", unit="s", ge=0
    )


class HttpSpec(BatchedSpec):
    """A grader of OpenRLHF's form: {query, prompts, labels} to {rewards, scores, extra_logs}."""


class JudgeSpec(EndpointSpec):
    """A model that judges by a rubric, behind an OpenAI-style chat completions endpoint."""

    url: str = setting(meaning="base address of the endpoint, such as http://HOST:PORT/v1")
    model: str = setting(meaning="name of the judging model, as the endpoint knows it")
    rubric: str = setting(min_length=1, meaning="text that says how to judge a response")
    lowest: float = setting(0.0, "score of the worst response, which becomes reward 0")
    highest: float = setting(10.0, "score of the best response, which becomes reward 1")
    reference: bool = setting(True, "show the judge the problem's reference answer if it has one")
    max_tokens: int = setting(1024, "length of a judgement", unit="tokens", gt=0)
    temperature: float = setting(0.0, "of the judge", ge=0)

    def check(self, key: str) -> None:
        super().check(key)
        refuse(
            self.lowest >= self.highest,
            f"{key}.lowest={self.lowest:g} is not below {key}.highest={self.highest:g}: give the "
            "scores of the worst and of the best response.",
        )


class LeanSpec(BatchedSpec):
    """A Kimina Lean server, which checks the proofs of the task `lean`."""

    url: str = setting(meaning="address of the server, such as http://HOST:8000")
    request_timeout_s: float = setting(300.0, "deadline of one request", unit="s", gt=0)
    deadline_s: float = setting(
        400.0, "deadline of a request and all its retries together", unit="s", gt=0
    )
    proof_timeout_s: int = setting(
        60, "Lean's time for one proof; one that takes longer is wrong", unit="s", gt=0
    )
    batch_size: int = setting(8, "proofs of one request, at most", gt=0)
    axioms: tuple[str, ...] = setting(
        ("propext", "Classical.choice", "Quot.sound"), "that a proof may rest on, directly or not"
    )
    start_timeout_s: float = setting(
        10.0, "deadline of the answer that the server gives before a run starts", unit="s", gt=0
    )

    def check(self, key: str) -> None:
        super().check(key)
        refuse(
            self.proof_timeout_s >= self.request_timeout_s,
            f"{key}.proof_timeout_s={self.proof_timeout_s} is not below "
            f"{key}.request_timeout_s={self.request_timeout_s:g}, which ends the request before "
            "Lean ends the proof: lower the first or raise the second.",
        )


class ClassifierSpec(Spec):
    """A Hugging Face sequence classifier of a local folder, on the CPU, in its own process."""

    path: str = setting(
        meaning="local folder of an AutoModelForSequenceClassification", names="model"
    )
    output: Literal["logit", "probability"] = setting(
        "logit", "what the reward is: the label's logit, or its sigmoid (softmax of several labels)"
    )
    label: int = setting(0, "index of the label, of a model with several", ge=0)
    dtype: Literal["float32", "bfloat16"] = setting("float32", "of the model")
    batch_size: int = setting(8, "samples of one forward pass, at most", gt=0)
    max_tokens: int = setting(
        1024, "a longer conversation is a failed score, never cut", unit="tokens", gt=0
    )
    timeout_s: float = setting(60.0, "deadline of one forward pass", unit="s", gt=0)
    threads: int = setting(1, "of the forward pass", gt=0)


class OwnSpec(Spec):
    """A class of yours that inherits `rlcore.tasks.rewards.protocols.Reward`."""

    name: str = setting(meaning="path/to/file.py:Class or package.module:Class", names="code")
    args: dict[str, Any] = setting(
        default_factory=dict, meaning="keyword arguments of its constructor"
    )
    deadline_s: float = setting(
        120.0, "the longest that it takes for one sample, which it has to keep", unit="s", gt=0
    )


class RewardSpec(Spec):
    """One reward that is added to a task's own: its weight, and one of the kinds."""

    weight: float = setting(1.0, "what the reward is multiplied by; 0: shown in the metrics alone")
    http: HttpSpec | None = setting(None, "a grader behind HTTP, in OpenRLHF's form")
    judge: JudgeSpec | None = setting(None, "a judge behind chat completions, with a rubric")
    classifier: ClassifierSpec | None = setting(None, "a local sequence classifier")
    lean: LeanSpec | None = setting(None, "a Lean server that checks proofs (task=lean)")
    own: OwnSpec | None = setting(None, "a class of yours")

    @property
    def endpoint(self) -> EndpointSpec | None:
        """The endpoint of a reward by HTTP; None for other rewards."""
        return self.http or self.judge or self.lean

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def deadline_s(self) -> float:
        """The longest wait for one sample once its turn has come, in seconds."""
        if self.classifier is not None:
            return self.classifier.timeout_s
        asked = self.endpoint or self.own
        assert asked is not None
        return asked.deadline_s

    def check(self, key: str) -> None:
        super().check(key)
        given = [name for name in KINDS if getattr(self, name) is not None]
        refuse(
            len(given) != 1,
            f"{key} has {' and '.join(given) or 'no kind'}: a reward is of one kind; give one of: "
            f"{', '.join(f'{key}.{name}' for name in KINDS)}.",
        )


# Classes that inherit `rewards.protocols.Reward`, by the section of their settings.
REWARDS: dict[str, str] = {
    "http": "rlcore.tasks.rewards.http:HttpReward",
    "judge": "rlcore.tasks.rewards.http:JudgeReward",
    "classifier": "rlcore.tasks.rewards.classifier:ClassifierReward",
    "lean": "rlcore.extras.lean:LeanReward",
}
KINDS = (*REWARDS, "own")


def check_labels(labels: object, key: str) -> None:
    """Raise UserError for a label that cannot be a part of a metric's name. `key`: of the task."""
    for label in labels if isinstance(labels, dict) else ():
        refuse(
            not LABEL.fullmatch(str(label)) or label in (OWN, "correct"),
            f"{key}.rewards.{label} is not accepted as a label: use lower-case letters, digits and "
            f"_, beginning with a letter, and neither {OWN} nor correct, which name the reward and "
            "the verdict of the task's own grader.",
        )
