"""What users inherit: a class with a forgotten method is refused in a sentence that names it, and
every registered implementation has all methods of its base class."""

import re

import pytest

from rlcore.agents.renderers import ChatRenderer, PlainRenderer
from rlcore.cluster.transports import GroupTransport
from rlcore.config.compose import load
from rlcore.config.names import load_own
from rlcore.corrections.pipeline import build
from rlcore.corrections.specs import CORRECTIONS
from rlcore.environments import ENVIRONMENTS, environment_maker
from rlcore.environments.protocol import Environment, Renderer
from rlcore.environments.specs import EnvironmentSpec
from rlcore.errors import UserError
from rlcore.interfaces import Correction, RolloutEngine, Task, TransportEnds, WeightTransport
from rlcore.learner.protocols import Companion, LogProbEstimator, TrainEngine
from rlcore.learner.specs import ENGINES as LEARNER_ENGINES
from rlcore.learner.specs import ESTIMATORS
from rlcore.metrics.logger import open_logger, own_sink
from rlcore.metrics.sinks import Sink
from rlcore.metrics.specs import LoggingSpec
from rlcore.objectives.protocols import Advantage, PolicyLoss
from rlcore.objectives.specs import ADVANTAGES, LOSSES, ObjectiveSpec, make_advantage, make_loss
from rlcore.registry import load_object, missing_methods, require_whole, resolve
from rlcore.rollout.request_book import DecodeCore
from rlcore.rollout.specs import ENGINES as ROLLOUT_ENGINES
from rlcore.tasks import TASKS, make_task
from rlcore.tasks.rewards.protocols import Reward
from rlcore.tasks.rewards.specs import REWARDS, OwnSpec
from rlcore.tasks.rewards.weighted import own_reward
from rlcore.weights.specs import GROUP_TRANSPORTS, TRANSPORTS

# base class -> what is registered under it
REGISTRIES = {
    Task: TASKS,
    Environment: ENVIRONMENTS,
    RolloutEngine: ROLLOUT_ENGINES,
    TrainEngine: LEARNER_ENGINES,
    LogProbEstimator: ESTIMATORS,
    Advantage: ADVANTAGES,
    PolicyLoss: LOSSES,
    WeightTransport: TRANSPORTS,
    GroupTransport: GROUP_TRANSPORTS,
    Reward: REWARDS,
}
BASES = [*REGISTRIES, DecodeCore, Companion, Renderer]
HOOKS = [Correction, Sink]  # base classes whose methods are all optional
ENTRIES = [(base, name) for base, registry in REGISTRIES.items() for name in registry]


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_every_forgotten_method_is_named_with_its_signature(base):
    required = missing_methods(type("Empty", (), {}), base)
    assert required
    for forgotten in required:
        rest = {name: None if name == forgotten else object() for name in required}
        del rest[forgotten]
        with pytest.raises(UserError) as refused:
            require_whole(type("Stub", (base,), rest), base, "key=file.py:Stub")
        said = str(refused.value)
        assert said.startswith("key=file.py:Stub is not accepted: the class Stub lacks ")
        written = (
            rf"lacks (the property {forgotten}|{forgotten}\((self|cls).*\) -> .+); every class"
        )
        assert re.search(written, said), said


@pytest.mark.parametrize("base", HOOKS, ids=lambda base: base.__name__)
def test_a_class_of_hooks_that_overrides_none_is_refused(base):
    with pytest.raises(UserError, match=r"Stub overrides nothing of .* override at least one of: "):
        require_whole(type("Stub", (base,), {"on_row": print}), base, "key=file.py:Stub")


@pytest.mark.parametrize(
    ("base", "name"), ENTRIES, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_registered_class_is_whole(base, name):
    found = resolve(REGISTRIES[base], name, key="key", like=base)
    assert issubclass(found, base)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_built_from_its_defaults_or_says_what_it_needs(name):
    try:
        task = make_task(name, {})
    except UserError as refused:
        assert re.match(r"task\.args\.|task metamath has proofs checked by", str(refused))
    else:
        assert isinstance(task, Task) and task.item("train", 0).prompt_id


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_is_built_from_its_defaults_or_says_what_it_needs(name):
    try:
        environment = environment_maker(EnvironmentSpec(name=name), make_task("digits", {}))()
    except UserError as refused:
        assert str(refused).startswith("environment.")
    else:
        assert isinstance(environment, Environment)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_is_built_from_its_defaults(name):
    needed = {"opsm": {"delta": 0.1}, "outliers": {"threshold": 0.1}}.get(name, {})
    spec = load_object(CORRECTIONS[name])(**needed)
    (stage,) = build({name: spec}, 0, ObjectiveSpec()).stages
    assert isinstance(stage.method, Correction)


def test_every_advantage_and_loss_is_built_from_its_defaults():
    for name in ADVANTAGES:
        assert isinstance(make_advantage(ObjectiveSpec(advantage=name)), Advantage)
    for name in LOSSES:
        assert isinstance(make_loss(ObjectiveSpec(loss=name)), PolicyLoss)


@pytest.mark.parametrize("full_weights_every", [1, 4])
def test_every_transport_has_two_ends(tmp_path, full_weights_every):
    ends = TransportEnds(print, print, tmp_path, 1 << 20, full_weights_every)
    for name in TRANSPORTS:
        assert isinstance(load_object(TRANSPORTS[name]).between(ends), WeightTransport)


def test_renderers_are_whole():
    for renderer in (PlainRenderer, ChatRenderer):
        assert not missing_methods(renderer, Renderer)


STUBS = """
from rlcore.corrections.specs import CorrectionSpec
from rlcore.interfaces import Correction, RolloutEngine, Task, WeightTransport
from rlcore.learner.protocols import TrainEngine
from rlcore.metrics.sinks import Sink
from rlcore.objectives.protocols import Advantage, PolicyLoss
from rlcore.tasks.rewards.protocols import Reward


class Sglang(RolloutEngine): ...
class Fsdp(TrainEngine): ...
class Transport(WeightTransport): ...
class Loss(PolicyLoss): ...
class Adv(Advantage): ...
class Nothing(Task): ...
class Score(Reward): ...
class Silent(Sink): ...
class Rows(Sink):
    def __init__(self, run_dir, config):
        self.file = open(run_dir / "mine.txt", "w")
    def note(self, text):
        print(text, file=self.file)
    def close(self):
        self.file.close()
"""


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(STUBS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("key", "name", "method"),
    [
        ("actor.bf16.engine", "Sglang", "step(self) -> list[Trajectory]"),
        ("learner.engine", "Fsdp", "grad_norm(self) -> float"),
        ("cluster.transport", "Transport", "publish(self, manifest: WeightManifest, "),
        ("algorithm.loss", "Loss", "__call__(self, log_ratio: Tensor, "),
        ("algorithm.advantage", "Adv", "__call__(self, rewards: Rewards) -> Tensor"),
    ],
)
def test_a_stub_by_path_is_refused_before_anything_starts(stubs, key, name, method):
    with pytest.raises(UserError, match=rf"^{key}=.*mine\.py:{name} .*{re.escape(method)}"):
        load_own(load(["run_dir=x", f"{key}='mine.py:{name}'"]))


def test_stubs_of_tasks_rewards_and_sinks_are_refused(stubs):
    with pytest.raises(UserError, match=r"^task\.name=mine\.py:Nothing .*grade\(self, item: Item"):
        make_task("mine.py:Nothing", {})
    with pytest.raises(UserError, match=r"^key\.name=mine\.py:Score .*submit\(self, asked"):
        own_reward("key", OwnSpec(name="mine.py:Score"))
    with pytest.raises(UserError, match=r"^logging\.sinks=mine\.py:Silent .*overrides nothing"):
        own_sink("mine.py:Silent")


def test_a_sink_of_a_users_own_receives_what_the_others_do(stubs, tmp_path):
    spec = LoggingSpec(console="off", wandb="disabled", sinks=("mine.py:Rows",))
    with open_logger(tmp_path / "run", spec, config={}, total_steps=1) as logger:
        logger.note("hello")
    assert (tmp_path / "run" / "mine.txt").read_text() == "hello\n"
