"""The RayJob of `rlcore launch cluster=kubernetes`, run as KubeRay 1.7 does: its commands, probes
and submitter (ray-operator/controllers/ray/common/pod.go, job.go) on three pods, which are nodes of
slurm_cluster.py, each with namespaces of its own. Only Kubernetes itself is missing."""

import resource

import pytest
import yaml
from slurm_cluster import lacks, small_cluster
from timing import wait_until

TOKEN = "0123456789abcdef" * 4  # KubeRay draws one for each cluster
HEAD = "n1"
STATED = {"block": "true", "dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"}
HEALTHY = (
    "python -c \"import urllib.request; r=urllib.request.urlopen('{url}', timeout=10); "
    "exit(0 if b'success' in r.read() else 1)\""
)
PROBE = "wget --tries 1 -T 2 -q -O- http://localhost:{} | grep success"


@pytest.fixture
def pods():
    if why := lacks():
        pytest.skip(why)
    with small_cluster() as cluster:
        yield cluster


def start_command(group, *, head):
    """`ray start` of a pod, as KubeRay puts it together from the group's parameters and limits."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    given = {"num-cpus": limits["cpu"], "memory": str(int(limits["memory"][:-2]) << 30)}
    given |= {"dashboard-host": "0.0.0.0"} if head else {"address": f"{HEAD}:6379"}
    words = []
    for name, value in sorted({**given, **STATED, **group["rayStartParams"]}.items()):
        words.append(f"--{name}" if value == "true" else f"--{name}={value}")
    limit = "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}"
    return f"{limit}; ray start {'--head ' if head else ''}{' '.join(words)}"


def environment(group, address):
    listed = group["template"]["spec"]["containers"][0].get("env", [])
    own = {one["name"]: one["value"] for one in listed if "value" in one}
    most = str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    own["RAY_START_ULIMIT_OPEN_FILES"] = most  # KubeRay reads it, too
    return own | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


def submitter(entrypoint, address="http://n1:8265", job="rlcore-1"):
    """The shell command of KubeRay's submitter."""
    at = f"--address {address}"
    healthy = HEALTHY.format(url=f"{address}/api/gcs_healthz")
    return (
        f"until {healthy} >/dev/null 2>&1 ; do echo waiting ; sleep 2 ; done ; "
        f"if ! ray job status {at} {job} >/dev/null 2>&1 ; then "
        f"ray job submit {at} --no-wait --submission-id {job} -- {entrypoint} ; fi ; "
        f"ray job logs {at} --follow {job}"
    )


def shell(pods, pod, command, environment):
    words = ("env", *(f"{k}={v}" for k, v in environment.items()), "bash", "-ce", command)
    return pods.command(pod, *words)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_ray_job_runs_as_kuberay_runs_it(pods):
    run_dir = pods.state / "a run"
    words = [word.replace("cluster=slurm", "cluster=kubernetes") for word in pods.words(steps=8)]
    words += [f"run_dir={run_dir}", f"cluster.launch.mount={pods.state}"]
    words += ["cluster.launch.image=rlcore:cpu", "cluster.launch.claim=runs"]
    words += ["cluster.launch.nodes=2", "cluster.launch.learner_nodes=1"]
    words += ["cluster.launch.memory_gib_per_node=4", "cluster.launch.head_memory_gib=2"]
    printed = pods.on("login", "python", "-m", "rlcore.cli", "launch", *words, "dry_run=true")
    assert printed.returncode == 0, printed.stderr
    job = yaml.safe_load(printed.stdout.split("# command")[0])["spec"]
    cluster = job["rayClusterSpec"]
    learner, actors = cluster["workerGroupSpecs"]
    head = cluster["headGroupSpec"]

    groups = {HEAD: head, "n2": learner, "n3": actors}
    for pod, group in groups.items():
        first = pod == HEAD
        its = environment(group, "127.0.0.1:6379" if first else f"{HEAD}:6379")
        wait = "" if first else f"until ray health-check --address {HEAD}:6379; do sleep 1; done; "
        pods.start(shell(pods, pod, wait + start_command(group, head=first), its))
    for pod in groups:
        checks = ["52365/api/local_raylet_healthz", "52365/api/healthz"]
        checks += ["8265/api/gcs_healthz"] if pod == HEAD else []
        for check in checks:
            probe = shell(pods, pod, PROBE.format(check), {})
            wait_until(lambda p=probe: pods.run(p).returncode == 0, 120, f"{pod}: {check}", 1.0)

    command = submitter(job["entrypoint"])
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    refused = pods.run(shell(pods, "login", "ray job list --address http://n1:8265", {}))
    assert refused.returncode, "a job server that takes jobs without the token"
    done = pods.run(shell(pods, "login", command, auth), seconds=400)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 8 and "step 8/8" in log, log[-3000:]
    # a submitter that Kubernetes starts again follows the job that it submitted before
    again = pods.run(shell(pods, "login", command, auth))
    assert again.returncode == 0 and "step 8/8" in again.stdout
    status = pods.run(
        shell(pods, "login", "ray job status --address http://n1:8265 rlcore-1", auth)
    )
    assert "succeeded" in status.stdout, status.stdout
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 8
