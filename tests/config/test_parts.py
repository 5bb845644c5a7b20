"""Parts of the learner besides the policy: each is listed, whole, and gone from a warm-up."""

import importlib
import pkgutil

import pytest

from rlcore.config import parts
from rlcore.config.combinations import FEATURES
from rlcore.config.compose import load
from rlcore.config.parts.part_facts import PartFacts

BASES = ["run_dir=x", "experiment=quickstart"]
USED = {
    "sparse training": ["actor=sparse", "learner.train_sparse=true"],
    "sparse copy": ["actor=sparse", "learner.distill={}"],
    "critic": ["algorithm=ppo", "critic=model"],
    "bitwise": ["schedule=on_policy", "bitwise=true", "learner.max_threads=null"],
    "rounding learner": ["actor=fp8", "learner.round_as=fp8"],
    "teacher": ["teacher=policy"],
}


def classes():
    for found in pkgutil.iter_modules(parts.__path__):
        module = importlib.import_module(f"{parts.__name__}.{found.name}")
        own = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
        yield from (v for v in own if isinstance(v, type) and issubclass(v, PartFacts))


def test_every_part_is_listed_and_whole():
    listed = {type(part) for part in parts.PARTS}
    for cls in {*classes()} - {PartFacts}:
        assert cls in listed, f"{cls.__name__} is not in PARTS"
        assert cls.setting is not PartFacts.setting, f"{cls.__name__} lacks setting"
    assert len({part.name for part in parts.PARTS}) == len(parts.PARTS)
    assert {part.name for part in parts.PARTS} < {*FEATURES}


def test_the_quickstart_has_no_part():
    plain = load(BASES)
    assert [part.name for part in parts.PARTS if part.setting(plain)] == []


@pytest.mark.parametrize("name", USED)
def test_a_warm_up_is_without_the_parts_that_would_change_its_model(name):
    config = load([*BASES, *USED[name]])
    (part,) = (part for part in parts.PARTS if part.setting(config))
    assert part.name == name
    assert not part.setting(part.plain(config))
