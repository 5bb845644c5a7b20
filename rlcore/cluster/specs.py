"""Settings of the Ray cluster. No Ray."""

from __future__ import annotations

from rlcore.spec import Spec, setting


class RaySpec(Spec):
    """The cluster that a run joins or starts."""

    address: str | None = setting(None, "Ray address; null: RAY_ADDRESS or a local cluster")
    num_cpus: int | None = setting(
        None, "local cluster; null: all, at least what the roles ask for", gt=0
    )
    object_store_mib: int = setting(
        512, "Ray's shared memory on a local cluster", unit="MiB", gt=75
    )
