"""Settings of `rlcore launch`: where a run is started, and its nodes. No Ray."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import field_validator, model_validator

from rlcore.errors import UserError
from rlcore.spec import Spec, Unread, refuse, setting

# Custom Ray resources of the nodes when the learner has nodes of its own. A role asks for a small
# share of the resource of its nodes.
LEARNER_RESOURCE = "rlcore_learner"
ACTOR_RESOURCE = "rlcore_actor"
RESOURCE_AMOUNT = 1000

ELSEWHERE = ("slurm", "kubernetes")  # kinds that get nodes for the run

# what nodes of the learner's own may have other amounts of
LEARNER_NODE = ("learner_cpus_per_node", "learner_gpus_per_node", "learner_memory_gib_per_node")
TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")
MOUNT = re.compile(r"/[^:,]*:/[^:,]*(:ro)?")
OPTION = re.compile("[a-z][a-z0-9-]+")
TIMES = ("time", "time-min", "begin", "deadline")  # options of sbatch
# options of sbatch that another key gives, and that key
OWN_OPTIONS = {
    "nodes": "nodes",
    "cpus-per-task": "cpus_per_node",
    "signal": "grace_s",
    "output": "",
    "ntasks-per-node": "",
}
# What a job of two parts has once, and what Slurm passes on to the second (slurm_opt.c of 22.05).
WHOLE_JOB = (
    *(*TIMES, "array", "chdir", "clusters", "dependency", "error", "export", "hold", "input"),
    *("job-name", "kill-on-invalid-dep", "no-kill", "no-requeue", "open-mode", "requeue", "wait"),
)
PASSED_ON = (
    *("account", "comment", "exclude", "mcs-label", "mem", "nice", "prefer", "priority", "qos"),
    *("reservation", "wckey"),
)
SECRET_NAME = re.compile(r"(?:^|_)(?:API)?(?:KEY|TOKEN|SECRET|PASSWORD)S?(?:_|$)", re.IGNORECASE)


class NodeSize(NamedTuple):
    """Amounts of one machine. Example: NodeSize(64, 512, 8)"""

    cpus: int
    memory_gib: int | None
    gpus: int


class JobPart(NamedTuple):
    """Equal nodes of a Slurm job, and their options of sbatch.

    Example: JobPart(2, NodeSize(64, 512, 8), {"partition": "h100"})
    """

    nodes: int
    size: NodeSize
    sbatch: dict[str, str]


class LaunchSpec(Spec):
    """Read by `rlcore launch`; `rlcore train` reads only learner_nodes, to place roles on nodes."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            (
                *("nodes", "cpus_per_node", "memory_gib_per_node", "env", "grace_s", "retries"),
                *("idle_gpus", *LEARNER_NODE),
            ),
            lambda spec: spec.kind in ("local", "ray"),
            "kind is neither slurm nor kubernetes",
        ),
        Unread(
            (
                *("start_timeout_s", "interface", "min_actor_nodes", "sbatch", "learner_sbatch"),
                *("setup", "container_image", "container_mounts"),
            ),
            lambda spec: spec.kind != "slurm",
            "kind is not slurm",
        ),
        Unread(("job_address",), lambda spec: spec.kind != "ray", "kind is not ray"),
        Unread(
            (
                *("image", "namespace", "claim", "mount", "secret", "node_selector"),
                *("fs_group", "tolerations", "image_pull_secrets", "labels", "pod"),
                *("head_cpus", "head_memory_gib"),
            ),
            lambda spec: spec.kind != "kubernetes",
            "kind is not kubernetes",
        ),
        Unread(
            (*LEARNER_NODE, "min_actor_nodes", "learner_sbatch"),
            lambda spec: not spec.learner_nodes,
            "learner_nodes=0 gives the learner no separate nodes",
        ),
        Unread(
            ("container_mounts",),
            lambda spec: spec.container_image is None,
            "container_image=null runs no container",
        ),
        Unread(
            ("container_runtime",),
            lambda spec: spec.kind != "slurm" or spec.container_image is None,
            "there is no slurm container (kind, container_image)",
        ),
    )

    kind: Literal["local", "ray", "slurm", "kubernetes"] = setting("local", "what starts the run")
    nodes: int = setting(1, "slurm, kubernetes: machines that roles run on", gt=0)
    cpus_per_node: int = setting(8, "slurm, kubernetes: CPUs of each", gt=0)
    gpus_per_node: int = setting(0, "slurm, kubernetes: GPUs of each", ge=0)
    gpu_memory_gib: float | None = setting(
        None, "of each GPU; a dry run refuses what needs more; null: not checked", unit="GiB", gt=0
    )
    memory_gib_per_node: int | None = setting(
        None,
        "required by kubernetes; null: slurm's default, all of it with sbatch.exclusive",
        unit="GiB",
        gt=0,
    )
    learner_nodes: int = setting(0, "nodes for the learner alone; 0: roles go anywhere", ge=0)
    min_actor_nodes: int | None = setting(
        None,
        "slurm: requeue at a checkpoint with fewer of the nodes without learners left; null: half "
        "of them",
        gt=0,
    )
    idle_gpus: Literal["refuse", "allow"] = setting(
        "refuse", "slurm, kubernetes: GPUs of the nodes that no role would use"
    )
    learner_cpus_per_node: int | None = setting(
        None, "slurm, kubernetes: CPUs of each of learner_nodes; null: as other nodes", gt=0
    )
    learner_gpus_per_node: int | None = setting(
        None, "slurm, kubernetes: GPUs of each of learner_nodes; null: as other nodes", ge=0
    )
    learner_memory_gib_per_node: int | None = setting(
        None, "slurm, kubernetes: of each of learner_nodes; null: as other nodes", unit="GiB", gt=0
    )
    head_cpus: int = setting(4, "kubernetes: of the pod of controller, buffer and graders", gt=0)
    head_memory_gib: int = setting(16, "kubernetes: of that pod", unit="GiB", gt=0)
    env: dict[str, str] = setting(
        default_factory=dict, meaning="environment of every node; no secrets"
    )
    start_timeout_s: int = setting(600, "slurm: deadline for all nodes to join", unit="s", gt=0)
    grace_s: int = setting(
        300,
        "for the last checkpoint before slurm's time limit, or before kubernetes ends a pod",
        unit="s",
        gt=0,
    )
    retries: int = setting(
        3,
        "slurm: requeues without a newer checkpoint, kubernetes: new clusters; each resumes the "
        "run",
        ge=0,
    )
    interface: str | None = setting(
        None, "slurm: network interface of Ray, such as ib0; null: the one between the nodes"
    )
    sbatch: dict[str, str] = setting(
        default_factory=dict, meaning="further #SBATCH options, e.g. partition, time"
    )
    learner_sbatch: dict[str, str] = setting(
        default_factory=dict,
        meaning="slurm: options of learner_nodes alone, e.g. partition, constraint; these or other "
        "amounts make the learner's nodes the first part of a heterogeneous job",
    )
    setup: list[str] = setting(
        default_factory=list, meaning="slurm: shell lines before anything else"
    )
    container_image: str | None = setting(
        None,
        "slurm: image that rlcore is in; a name (pyxis), a file or docker://NAME (apptainer); "
        "null: the environment that launches",
    )
    container_runtime: Literal["pyxis", "apptainer"] = setting(
        "pyxis", "what runs it: srun --container-image, or apptainer exec"
    )
    container_mounts: list[str] = setting(
        default_factory=list,
        meaning="slurm: SOURCE:TARGET folders in the container, where run_dir, model and data are",
    )
    job_address: str | None = setting(
        None, "ray: job server, http://HOST:PORT; null: drive the run from here"
    )
    image: str | None = setting(None, "kubernetes: an image of docker/")
    namespace: str = setting("default", "kubernetes: namespace of the job")
    claim: str | None = setting(None, "kubernetes: persistent volume claim that holds run_dir")
    mount: str = setting("/data", "kubernetes: where the claim is mounted")
    secret: str | None = setting(None, "kubernetes: secret whose keys become environment variables")
    node_selector: dict[str, str] = setting(
        default_factory=dict, meaning="kubernetes: labels of eligible machines"
    )
    fs_group: int | None = setting(
        None, "kubernetes: group that the volume's files belong to, for images without root", ge=0
    )
    tolerations: list[dict[str, str | int]] = setting(
        default_factory=list,
        meaning="kubernetes: of tainted machines, e.g. {key: nvidia.com/gpu, operator: Exists}",
    )
    image_pull_secrets: list[str] = setting(
        default_factory=list, meaning="kubernetes: secrets of the image's registry"
    )
    pod: dict[str, Any] = setting(
        default_factory=dict,
        meaning="kubernetes: merged into the template of every pod, e.g. {metadata: {annotations: "
        "{...}}, spec: {containers: [{securityContext: {capabilities: {add: [IPC_LOCK]}}}]}}",
    )
    labels: dict[str, str] = setting(
        default_factory=dict,
        meaning="kubernetes: of the job, e.g. kueue.x-k8s.io/queue-name for Kueue",
    )

    def check(self, key: str) -> None:
        wrong = next((m for m in self.container_mounts if not MOUNT.fullmatch(m)), "")
        refuse(
            bool(wrong),
            f"{key}.container_mounts={wrong} is not accepted: write SOURCE:TARGET, both absolute.",
        )
        array = (self.sbatch | self.learner_sbatch).get("array")
        refuse(
            array is not None,
            f"{key}.sbatch.array={array} is not accepted, since all tasks of an "
            "array would write to one run_dir: use rlcore sweep, which submits a job for each "
            "combination of values.",
        )
        self._check_sbatch(key)
        if len(self.parts) > 1:
            self._check_parts(key)
        actors = self.nodes - self.learner_nodes
        refuse(
            self.min_actor_nodes is not None and 0 < actors < self.min_actor_nodes,
            f"{key}.min_actor_nodes={self.min_actor_nodes} is more than the {actors} nodes that "
            f"{key}.learner_nodes={self.learner_nodes} leaves of {key}.nodes={self.nodes}: choose "
            f"at most {actors}.",
        )
        unknown = {n for t in self.tolerations for n in t} - set(TOLERATION)
        refuse(
            bool(unknown),
            f"{key}.tolerations.{min(unknown, default='')} is not a field of a toleration: choose "
            f"among {', '.join(TOLERATION)}.",
        )

    def _check_sbatch(self, key: str) -> None:
        refuse(
            "hetjob" in self.sbatch,
            f"{key}.sbatch.hetjob is not accepted: {key}.learner_nodes=1 with "
            f"{key}.learner_gpus_per_node, learner_cpus_per_node, learner_memory_gib_per_node or "
            "learner_sbatch makes a job of two parts.",
        )
        for name in OWN_OPTIONS.keys() & self.sbatch:
            remedy = f"set {key}.{OWN_OPTIONS[name]}" if OWN_OPTIONS[name] else "leave it out"
            refuse(True, f"{key}.sbatch.{name} is what rlcore gives to sbatch itself: {remedy}.")
        for own, options in (("sbatch", self.sbatch), ("learner_sbatch", self.learner_sbatch)):
            odd = [
                (name, value)
                for name, value in options.items()
                if not (OPTION.fullmatch(name) and value.isprintable())
            ]
            name, value = odd[0] if odd else ("", "")
            refuse(
                bool(odd),
                f"{key}.{own}.{name!r}={value!r} cannot be written to the script: write the "
                "long name of an option without its hyphens, and a value of one line.",
            )

    def _check_parts(self, key: str) -> None:
        """Refuse what Slurm does not do in a job of two parts, or does to both."""
        own = f"{key}.learner_sbatch"
        for name, value in self.learner_sbatch.items():
            refuse(
                name in OWN_OPTIONS or name == "hetjob",
                f"{own}.{name} is what rlcore gives to sbatch itself: leave it out.",
            )
            refuse(
                name in WHOLE_JOB,
                f"{own}.{name}={value} would not hold for the learner's nodes alone, since a job "
                f"has one: give {key}.sbatch.{name}.",
            )
            refuse(
                name in PASSED_ON and name not in self.sbatch,
                f"{own}.{name}={value} would hold for the other nodes, too, since Slurm passes it "
                f"on to a job's second part: give {key}.sbatch.{name}, which is theirs.",
            )
        memory = self.parts[0].size.memory_gib is not None or "exclusive" in self.learner_sbatch
        refuse(
            memory and self.memory_gib_per_node is None and "exclusive" not in self.sbatch,
            f"{key}.memory_gib_per_node=null would give the memory of the learner's nodes to the "
            f"others, since Slurm passes it on to a job's second part: set it.",
        )
        refuse(
            self.min_actor_nodes is not None or "no-kill" in self.sbatch,
            f"{key}.min_actor_nodes and {key}.sbatch.no-kill are not accepted in a job of two "
            "parts, which Slurm requeues when it loses a node: leave both out, or give all nodes "
            "the same amounts.",
        )

    @field_validator("env", "sbatch", "learner_sbatch", "node_selector", "labels", mode="before")
    @classmethod
    def _takes_numbers(cls, data: Any) -> Any:
        """Numbers as text, but a time as a number, which may be YAML's reading of 24:00:00."""
        if not isinstance(data, dict):
            return data
        return {
            name: str(value) if type(value) in (int, float) and name not in TIMES else value
            for name, value in data.items()
        }

    @property
    def least_nodes(self) -> int:
        """Nodes that a Slurm job goes on with; 0: it needs all of them."""
        if not self.learner_nodes:
            return 0
        actors = self.nodes - self.learner_nodes
        return self.learner_nodes + (self.min_actor_nodes or -(-actors // 2))

    @property
    def parts(self) -> tuple[JobPart, ...]:
        """The learner's nodes and the others where they differ on Slurm, else all nodes."""
        learner, others = self.node(of_learner=True), self.node(of_learner=False)
        unlike = self.learner_nodes and (self.learner_sbatch or learner != others)
        if self.kind != "slurm" or not unlike:
            return (JobPart(self.nodes, others, self.sbatch),)
        return (
            JobPart(self.learner_nodes, learner, self.sbatch | self.learner_sbatch),
            JobPart(self.nodes - self.learner_nodes, others, self.sbatch),
        )

    def node(self, *, of_learner: bool) -> NodeSize:
        """Amounts of each of the learner's nodes, or of each of the others."""
        common = NodeSize(self.cpus_per_node, self.memory_gib_per_node, self.gpus_per_node)
        if not (of_learner and self.learner_nodes):
            return common
        cpus, gpus, memory_gib = (getattr(self, name) for name in LEARNER_NODE)
        return NodeSize(
            common.cpus if cpus is None else cpus,
            common.memory_gib if memory_gib is None else memory_gib,
            common.gpus if gpus is None else gpus,
        )

    @model_validator(mode="before")
    @classmethod
    def _holds_no_secret(cls, data: Any) -> Any:
        """Refuse variables that look like secrets: `env` is written to config.yaml and to the job's
        script. This is a validator, not `check`, so that no other message can show the value."""
        env = data.get("env") if isinstance(data, dict) else None
        if not isinstance(env, dict):
            return data
        for name in env:
            if SECRET_NAME.search(str(name)):
                raise UserError(
                    f"cluster.launch.env.{name} is not accepted: its value would be written to "
                    "config.yaml and the job's script; export it in the job's environment instead "
                    "(kubernetes: cluster.launch.secret)."
                )
        return data
