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
TIMES = ("time", "time-min", "begin", "deadline")  # options of sbatch
SECRET_NAME = re.compile(r"(?:^|_)(?:API)?(?:KEY|TOKEN|SECRET|PASSWORD)S?(?:_|$)", re.IGNORECASE)


class NodeSize(NamedTuple):
    """Amounts of one machine. Example: NodeSize(64, 512, 8)"""

    cpus: int
    memory_gib: int
    gpus: int


class LaunchSpec(Spec):
    """Read by `rlcore launch`; `rlcore train` reads only learner_nodes, to place roles on nodes."""

    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(
            (
                *("nodes", "cpus_per_node", "memory_gib_per_node", "env", "grace_s", "retries"),
                "idle_gpus",
            ),
            lambda spec: spec.kind in ("local", "ray"),
            "kind is neither slurm nor kubernetes",
        ),
        Unread(
            (
                *("start_timeout_s", "interface", "min_actor_nodes", "sbatch", "setup"),
                *("container_image", "container_mounts"),
            ),
            lambda spec: spec.kind != "slurm",
            "kind is not slurm",
        ),
        Unread(("job_address",), lambda spec: spec.kind != "ray", "kind is not ray"),
        Unread(
            (
                *("image", "namespace", "claim", "mount", "secret", "node_selector"),
                *("fs_group", "tolerations", "image_pull_secrets", "labels", "pod"),
                *("head_cpus", "head_memory_gib", *LEARNER_NODE),
            ),
            lambda spec: spec.kind != "kubernetes",
            "kind is not kubernetes",
        ),
        Unread(
            (*LEARNER_NODE, "min_actor_nodes"),
            lambda spec: not spec.learner_nodes,
            "learner_nodes=0 gives the learner no nodes of its own",
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
        None, "kubernetes: CPUs of each of learner_nodes; null: as other nodes", gt=0
    )
    learner_gpus_per_node: int | None = setting(
        None, "kubernetes: GPUs of each of learner_nodes; null: as other nodes", ge=0
    )
    learner_memory_gib_per_node: int | None = setting(
        None, "kubernetes: of each of learner_nodes; null: as other nodes", unit="GiB", gt=0
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
        refuse(
            "array" in self.sbatch,
            f"{key}.sbatch.array={self.sbatch.get('array')} is not accepted, since all tasks of an "
            "array would write to one run_dir: use rlcore sweep, which submits a job for each "
            "combination of values.",
        )
        refuse(
            "hetjob" in self.sbatch,
            f"{key}.sbatch.hetjob is not accepted, since all nodes of a job have the same amounts: "
            f"ask for the larger ones, or use {key}.kind=kubernetes, whose learner nodes have "
            "amounts of their own.",
        )
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
            f"{key}.tolerations.{min(unknown, default='')} is no field of a toleration: choose "
            f"among {', '.join(TOLERATION)}.",
        )

    @field_validator("env", "sbatch", "node_selector", "labels", mode="before")
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

    def node(self, *, of_learner: bool) -> NodeSize:
        """Amounts of each node of a worker group on Kubernetes. The memory must be set."""
        assert self.memory_gib_per_node is not None
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
