"""Confining the present process, and the paths that a confined process may read."""

from __future__ import annotations

import sys
from pathlib import Path

from rlcore.graders.sandbox.confinement import Confinement, available
from rlcore.tasks.isolation.executed import ArithmeticOnly


def readable() -> dict[str, str]:
    """Folders that a grader may import from while it grades: rlcore and installed packages, but not
    a user's own modules and data."""
    installed = [path for path in sys.path if path and any(Path(path).glob("*.dist-info"))]
    found = dict.fromkeys([*installed, str(Path(__file__).parents[2])])
    return {str(number): path for number, path in enumerate(found)}


def confine() -> ArithmeticOnly:
    """Confine this process for good, by what the machine has of `confinement.LAYERS`. It writes no
    file, starts no process, opens no connection, reads libraries alone, and evaluates text as
    arithmetic alone. Open descriptors stay. Its limits are the caller's. Raises OSError."""
    layers = [layer for layer in available() if layer != "tmpfs"]  # that is a root for many forks
    confinement = Confinement(layers, {}, folder=None, packages=readable())
    confinement.apply(confinement.rules())
    rule = ArithmeticOnly()
    rule.install()
    return rule
