"""Episodes of several turns: the protocol, and the processes that environments live in.

`environment_maker` is the entry point; an environment's module is imported when it is named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.registry import load_object, missing_methods, resolve, signature_of

if TYPE_CHECKING:
    from rlcore.environments.protocol import Environment

ENVIRONMENTS: dict[str, str] = {
    "alphabet_sort": "rlcore.environments.games:AlphabetSortGame",
    "attempts": "rlcore.environments.attempts:Attempts",
    "calculator": "rlcore.environments.python_tool:Calculator",
    "endpoint": "rlcore.agents.endpoint:Endpoint",
    "gymnasium": "rlcore.agents.gymnasium_text:GymnasiumText",
    "higher_lower": "rlcore.environments.games:HigherLower",
    "mcp": "rlcore.agents.mcp:McpTools",
    "openenv": "rlcore.agents.openenv:OpenEnv",
    "python_tool": "rlcore.environments.python_tool:PythonTool",
    "rooms": "rlcore.environments.games:Rooms",
    "task": "rlcore.environments.attempts:OneTurn",
    "textarena": "rlcore.agents.textarena:TextArena",
}
TRL = "rlcore.agents.trl:trl_maker"


def _written_for_trl(cls: Any, spec: EnvironmentSpec) -> bool:
    """Return whether a class has TRL's methods. A class that has all of rlcore's methods counts as
    rlcore's."""
    own = all(callable(getattr(cls, method, None)) for method in ("reset", "step", "grade"))
    scored = hasattr(cls, "get_reward") or "rewards" in spec.args
    return not own and isinstance(cls, type) and hasattr(cls, "reset") and scored


def environment_maker(spec: EnvironmentSpec, task: Task) -> Callable[[], Environment]:
    """A function that builds an instance for one episode over the task's problems.

    Builds one at once, so that a wrong argument is refused. Raises UserError naming
    `environment.name` or `environment.args`.
    """
    from rlcore.environments.protocol import Environment

    assert spec.name is not None
    cls = resolve(ENVIRONMENTS, spec.name, key="environment.name")
    if _written_for_trl(cls, spec):
        adapted: Callable[[], Environment] = load_object(TRL)(cls, spec, task)
        return adapted
    if isinstance(cls, dict):
        raise UserError(
            f"environment.name={spec.name} is a dictionary of environments, of which TRL chooses "
            "one by row, and a run plays one: name a class."
        )
    lacking = missing_methods(cls, Environment) if isinstance(cls, type) else []
    if lacking:
        raise UserError(
            f"environment.name={spec.name} is not accepted: it lacks "
            f"{', '.join(signature_of(Environment, name) for name in lacking)}; an environment has "
            "reset, step and grade (rlcore.environments.protocol), and one written for TRL has "
            "reset and get_reward, or reward functions in environment.args.rewards."
        )
    args = dict(spec.args)
    if "task" in inspect.signature(cls).parameters:
        args["task"] = task

    def make() -> Environment:
        environment: Environment = cls(**args)
        return environment

    try:
        make()
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(
            f"environment.args={spec.args} does not suit environment.name={spec.name} ({error}): "
            "correct the arguments."
        ) from error
    return make
