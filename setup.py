"""Puts the configuration groups and the launchers' templates into a wheel, from which `rlcore` runs
outside a checkout. Everything else about the package is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("configs", "launchers")


class BuildWithShipped(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout's own folders are used
            return
        for name in SHIPPED:
            there = Path(self.build_lib) / "rlcore" / "shipped" / name
            shutil.copytree(name, there, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithShipped})
