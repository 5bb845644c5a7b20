"""The rooms that a reader of the core may skip, and what the core calls of them.

A contract of pyproject.toml holds that nothing but the command line and `rlcore.api` imports a
room. The core looks up here what it needs of one, and the room is imported then.
"""

from __future__ import annotations

from typing import Any

from rlcore.registry import load_object

ROOMS = {
    "expected": "rlcore.advisor.plan:expected",  # the pace that a dry run prints
    "report": "rlcore.report.compare:report",  # of a sweep's runs
    "write_report": "rlcore.report.page:write_report",  # at the end of a run
    "write_replay": "rlcore.report.replay_page:write_replay",
    "make_renderer": "rlcore.agents.renderers:make_renderer",
    "check_template": "rlcore.agents.renderers:check_template",
    "conversation_form": "rlcore.agents.renderers:conversation_form",
    "lost_roles": "rlcore.agents.renderers:lost_roles",
    "worked_episode": "rlcore.agents.renderers:worked_episode",
    "program_root": "rlcore.agents.shell_program:ROOT",
    "put_away": "rlcore.agents.shell_program:put_away_of",
    "gpus": "rlcore.advisor.planner.gpus:GPUS",  # choices of keys
    "shapes": "rlcore.advisor.planner.gpus:SHAPES",
}


def from_room(name: str) -> Any:
    """The object of a room by its name in `ROOMS`."""
    return load_object(ROOMS[name])
