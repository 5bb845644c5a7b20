"""Where the roles of a run would be on the nodes of `cluster.launch`, which a launcher has not got
yet. Ray may choose other nodes; what does not fit here would wait there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlcore.commands import derived
from rlcore.config.parts import PARTS
from rlcore.config.places import tied_by
from rlcore.config.schema import RunConfig
from rlcore.rollout.specs import ActorSpec
from rlcore.spec import refuse

CLOSE = 1e-6  # shares of a CPU or a GPU add up to whole ones
KEY = "cluster.launch"


@dataclass(frozen=True, slots=True)
class Role:
    """A process with resources. Example: Role("actor.fp8", 4.0, 2.0, of_learner=False)"""

    name: str
    cpus: float
    gpus: float
    of_learner: bool = False


@dataclass(slots=True)
class Machine:
    """A node and the roles on it. `of_learner`: None takes any role."""

    name: str
    cpus: float
    gpus: float
    of_learner: bool | None = None
    roles: list[Role] = field(default_factory=list)

    def takes(self, role: Role) -> bool:
        """Return whether the role may be here and fits."""
        mine = self.of_learner is None or self.of_learner == role.of_learner
        return mine and role.cpus <= self.free_cpus + CLOSE and role.gpus <= self.free_gpus + CLOSE

    @property
    def free_cpus(self) -> float:
        return self.cpus - sum(role.cpus for role in self.roles)

    @property
    def free_gpus(self) -> float:
        return self.gpus - sum(role.gpus for role in self.roles)

    def __str__(self) -> str:
        counts = Counter(role.name for role in self.roles)
        held = ", ".join(f"{n} x {name}" for name, n in counts.items()) or "no role"
        gpus = f", {self.gpus - self.free_gpus:g} of {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.name}: {held} ({self.cpus - self.free_cpus:g} of {self.cpus:g} CPUs{gpus})"


def roles(config: RunConfig) -> list[Role]:
    """Every process of the run that asks for resources."""
    engines: dict[str, ActorSpec] = dict(config.actor)
    if (plain := derived.evaluation_actor(config)) is not None:
        engines["evaluation"] = plain
    engines |= {own.role: own.spec for part in PARTS for own in part.engines(config)}
    ranks, learner = derived.ranks(config), config.learner
    found, shared = [], 0
    for label, actor in engines.items():
        name = f"actor.{label}" if label in config.actor else label
        for _ in range(actor.count):
            role = Role(name, actor.num_cpus, actor.num_gpus * actor.tensor_parallel)
            if tied_by(config) and label in config.actor:  # one place for an engine and its rank
                rank = learner.num_cpus if shared < ranks else 0.0
                gpu = 1.0 if actor.num_gpus else 0.0
                role = Role(f"{name} with a learner rank", actor.num_cpus + rank, gpu)
                shared += 1
            found.append(role)
    alone = 0 if tied_by(config) else ranks
    of_learner = Role("learner rank", learner.num_cpus, learner.num_gpus, of_learner=True)
    return [*found, *[of_learner] * alone]


def machines(config: RunConfig) -> list[Machine]:
    """The empty nodes of `cluster.launch`, the driver's first."""
    spec = config.cluster.launch
    own = spec.learner_nodes
    found = []
    if spec.kind == "kubernetes":
        found.append(Machine("head", spec.head_cpus, 0, False if own else None))
    for i in range(spec.nodes):
        of_learner = (i < own) if own else None
        size = spec.node(of_learner=bool(of_learner))
        found.append(Machine(f"node {i + 1}", size.cpus, size.gpus, of_learner))
    return found


def placed(config: RunConfig) -> list[Machine]:
    """The nodes with the roles on them, the largest roles first. Raises UserError if they do not
    fit."""
    return _placed(config, roles(config))


def _placed(config: RunConfig, wanted: Sequence[Role]) -> list[Machine]:
    found, left = machines(config), []
    for role in sorted(wanted, key=lambda r: (-r.gpus, -r.cpus)):
        place = next((machine for machine in found if machine.takes(role)), None)
        if place is None:
            left.append(role)
        else:
            place.roles.append(role)
    if left:
        spec, first, count = config.cluster.launch, left[0], Counter(r.name for r in left)
        asked = (
            f"{first.cpus:g} CPUs and {first.gpus:g} GPUs"
            if first.gpus
            else (f"{first.cpus:g} CPUs")
        )
        where = "of the learner's " if spec.learner_nodes and first.of_learner else ""
        size, keys = spec.node(of_learner=first.of_learner), _keys(config, first.of_learner)
        refuse(
            True,
            f"{KEY}.nodes={spec.nodes} with {keys[0]}={size.cpus} and "
            f"{keys[1]}={size.gpus} hold all but {count[first.name]} x "
            f"{first.name}, each of {asked} on one {where}node: raise these keys, or lower "
            "actor.*.count, actor.*.num_cpus, learner.ranks or learner.num_cpus.",
        )
    return found


def _keys(config: RunConfig, of_learner: bool) -> list[str]:
    """The keys that say how many CPUs and GPUs each of the learner's nodes, or the others, have."""
    spec, found = config.cluster.launch, ("cpus_per_node", "gpus_per_node")
    own = {n for n in found if of_learner and getattr(spec, f"learner_{n}") is not None}
    return [f"{KEY}.{'learner_' * (n in own)}{n}" for n in found]


def check_idle(config: RunConfig, found: Sequence[Machine]) -> Iterator[str]:
    """A sentence where GPUs of the nodes are used by no role. Raises UserError with it unless that
    is allowed."""
    spec, total = config.cluster.launch, sum(machine.gpus for machine in found)
    used = total - sum(machine.free_gpus for machine in found)
    if used >= total - CLOSE:
        return
    said = f"{used:g} of the {total:g} GPUs of {KEY} (nodes x gpus_per_node) are used"
    advice = f"{_remedy(config, found)}, or {KEY}.idle_gpus=allow"
    refuse(spec.idle_gpus == "refuse", f"{said}: {advice}.")
    yield f"{said}: {_remedy(config, found)} would use all"


def _remedy(config: RunConfig, found: Sequence[Machine]) -> str:
    """Keys with which no GPU would be idle, by trial."""
    spec = config.cluster.launch
    nodes = sum(1 for machine in found if machine.free_gpus < machine.gpus)
    used = {_keys(config, bool(m.of_learner))[1]: 0.0 for m in found}
    for machine in found:
        key = _keys(config, bool(machine.of_learner))[1]
        used[key] = max(used[key], machine.gpus - machine.free_gpus)
    fewer = " ".join(f"{key}={most:g}" for key, most in used.items())
    if nodes:
        fewer = f"{KEY}.nodes={max(nodes, spec.learner_nodes + 1)} {fewer}"
    label, actor = next(iter(config.actor.items()))
    wanted = roles(config)
    like = next((r for r in wanted if r.name.startswith(f"actor.{label}") and r.gpus), None)
    ranks = next((r for r in wanted if r.of_learner and r.gpus), None)
    for more_ranks in (False, True):
        if like is None or (more_ranks and ranks is None):
            continue
        counts = {like.name: 0, "learner rank": 0}
        trial = [machine_with(m) for m in found]
        for machine in trial:
            for role in filter(None, (like, ranks if more_ranks else None)):
                while machine.takes(role):
                    machine.roles.append(role)
                    counts[role.name] += 1
        if all(machine.free_gpus <= CLOSE for machine in trial):
            keys = [f"actor.{label}.count={actor.count + counts[like.name]}"]
            if counts["learner rank"]:
                keys.append(f"learner.ranks={config.learner.ranks + counts['learner rank']}")
            return f"set {' '.join(keys)}, or ask for {fewer}"
    return f"ask for {fewer}"


def machine_with(machine: Machine) -> Machine:
    """A copy that takes further roles by itself."""
    return replace(machine, roles=list(machine.roles))
