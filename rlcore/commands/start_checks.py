"""All checks of a run that need no process: one collector, which `rlcore train` and its dry run,
`launch` and `sweep` call before anything starts."""

from __future__ import annotations

from rlcore.cluster.placement import free_port
from rlcore.cluster.ray_cluster import check_cluster
from rlcore.cluster.specs import joined_address
from rlcore.commands import derived
from rlcore.commands.memory import check_memory, stored_bytes
from rlcore.commands.preflight import (
    Prepared,
    ask_lean_servers,
    check_writable,
    prepare,
    refuse_another_run,
)
from rlcore.commands.warm_up import kept_at, kept_model
from rlcore.config.schema import RunConfig
from rlcore.errors import Faults
from rlcore.launch.specs import ELSEWHERE
from rlcore.metrics.logger import require_free_endpoint


def check(config: RunConfig) -> Prepared:
    """The inputs that a run needs, after all checks. Raises UserError with all faults."""
    config = derived.with_stated_threads(config)
    faults = Faults()
    fresh = config.model.path is None
    if not fresh:  # before other checks of a model that is too large
        faults.of(check_memory, config, None)
    prepared = faults.of(prepare, config)
    faults.of(refuse_another_run, config)
    faults.of(check_writable, "run_dir", config.run_dir)
    if fresh and kept_model(config) is None:
        faults.of(check_writable, "model.warmup.cache_dir", str(kept_at(config).parent))
    if fresh and prepared is not None:
        faults.of(check_memory, prepared.config, prepared.tokenizer)
    _check_places(config, prepared, faults)
    faults.end()
    assert prepared is not None
    return prepared


def _check_places(config: RunConfig, prepared: Prepared | None, faults: Faults) -> None:
    """Check CPUs, GPUs, the object store, and the ports of metrics and learner: of this machine, or
    of the nodes that a launcher would ask for. A cluster that exists is not joined."""
    if config.cluster.launch.kind in ELSEWHERE:
        from rlcore.commands.node_places import check_idle, placed  # read by few runs

        # lines of the resources, of which only the refusals count
        faults.of(lambda: list(check_idle(config, placed(config))))
        return
    cpus, gpus = derived.needed(config)
    size = None
    if prepared is not None or config.model.path is not None:
        size = faults.of(stored_bytes, config, prepared and prepared.tokenizer)
    faults.of(
        check_cluster,
        config.cluster,
        needed_cpus=cpus,
        needed_gpus=gpus,
        store_bytes=size or 0,
    )
    faults.of(ask_lean_servers, config)
    faults.of(require_free_endpoint, config.logging)
    # In a joined cluster the port must be free on rank 0's node, which is not chosen yet.
    if joined_address(config.cluster.address) is None:
        faults.of(free_port, config.learner.port)
