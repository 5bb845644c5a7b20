"""Where `rlcore launch` starts a run: this machine, an existing Ray cluster, Slurm, or Kubernetes."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from rlcore.config.correction_schema import Strict
from rlcore.errors import UserError

SECRET_NAME = re.compile(r"(?:^|_)(?:API)?(?:KEY|TOKEN|SECRET|PASSWORD)S?(?:_|$)", re.IGNORECASE)


class LaunchConfig(Strict):
    """Read by `rlcore launch`; of these `rlcore train` reads learner_nodes alone, to bind roles to their nodes."""

    kind: Literal["local", "ray", "slurm", "kubernetes"] = Field(default="local", description="what starts the run")
    nodes: int = Field(default=1, gt=0, description="slurm, kubernetes: machines that roles run on")
    cpus_per_node: int = Field(default=8, gt=0, description="slurm, kubernetes")
    gpus_per_node: int = Field(default=0, ge=0, description="slurm, kubernetes")
    memory_gib_per_node: int | None = Field(
        default=None, gt=0, description="kubernetes must know it; null: slurm's default"
    )
    learner_nodes: int = Field(default=0, ge=0, description="nodes for the learner alone; 0: roles go anywhere")
    env: dict[str, str] = Field(default_factory=dict, description="environment of every node; no secrets")
    start_timeout_s: int = Field(default=600, gt=0, description="slurm: deadline for all nodes to join")
    grace_s: int = Field(default=300, gt=0, description="seconds from SIGTERM to the end, for a checkpoint")
    retries: int = Field(default=3, ge=0, description="slurm: requeues, kubernetes: new clusters; the run is resumed")
    sbatch: dict[str, str] = Field(default_factory=dict, description="further #SBATCH options, e.g. partition, time")
    setup: list[str] = Field(default_factory=list, description="slurm: shell lines before anything else")
    job_address: str | None = Field(
        default=None, description="ray: job server, http://HOST:PORT; null: drive the run from here"
    )
    image: str | None = Field(default=None, description="kubernetes: an image of docker/")
    namespace: str = Field(default="default", description="kubernetes")
    claim: str | None = Field(default=None, description="kubernetes: persistent volume claim that holds run_dir")
    mount: str = Field(default="/data", description="kubernetes: where the claim is mounted")
    secret: str | None = Field(default=None, description="kubernetes: secret whose keys become environment variables")
    node_selector: dict[str, str] = Field(default_factory=dict, description="kubernetes: labels of eligible machines")

    @model_validator(mode="before")
    @classmethod
    def _holds_no_secret(cls, data: Any) -> Any:
        """Values of `env` end up in config.yaml, the job's script and its dry run. No message shows one either."""
        env = data.get("env") if isinstance(data, dict) else None
        if isinstance(env, dict):
            for name in env:
                if SECRET_NAME.search(str(name)):
                    raise UserError(
                        f"cluster.launch.env.{name} is not accepted: its value would be written to config.yaml and the "
                        "job's script; export it in the job's environment instead (kubernetes: cluster.launch.secret)."
                    )
        return data
