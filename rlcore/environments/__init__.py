"""Episodes of several turns: the protocol, renderers, and the processes that environments live in.

`environment_maker` is the entry point; an environment's module is imported when it is named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from rlcore.environments.protocol import Environment
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.interfaces import Task
from rlcore.registry import resolve

ENVIRONMENTS: dict[str, str] = {
    "alphabet_sort": "rlcore.environments.alphabet_sort:AlphabetSort",
    "attempts": "rlcore.environments.attempts:Attempts",
    "higher_lower": "rlcore.environments.higher_lower:HigherLower",
    "python_tool": "rlcore.environments.python_tool:PythonTool",
    "rooms": "rlcore.environments.rooms:Rooms",
    "task": "rlcore.environments.one_turn:OneTurn",
}


def environment_maker(spec: EnvironmentSpec, task: Task) -> Callable[[], Environment]:
    """A function that builds an instance for one episode over the task's problems.

    Builds one at once, so that a wrong argument is refused. Raises UserError naming
    `environment.name` or `environment.args`.
    """
    assert spec.name is not None
    cls = resolve(ENVIRONMENTS, spec.name, key="environment.name")
    for method in ("reset", "step", "grade"):
        if not callable(getattr(cls, method, None)):
            raise UserError(
                f"environment.name={spec.name} has no method {method}: an environment has reset, "
                "step and grade (rlcore.environments.protocol)."
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
            f"environment.args={spec.args} does not suit environment.name={spec.name}: {error}."
        ) from error
    return make
