"""The RayJob of `rlcore launch cluster=kubernetes` and the kustomize folders of launchers/, checked
by KubeRay's own definitions (`crd.py`)."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import crd
import jsonschema
import pytest
import yaml

from rlcore.cli import main
from rlcore.config.compose import load
from rlcore.errors import UserError
from rlcore.launch.job import HEAD_PORTS, job_name, render, with_metrics_port
from rlcore.launch.specs import LaunchSpec

WORDS = ["experiment=math_fp8_gpu", "run_dir=/data/a b", "model.path=it's"]
KUSTOMIZE = Path(__file__).resolve().parents[2] / "launchers/kustomize"
KUBERNETES = LaunchSpec(
    kind="kubernetes",
    nodes=3,
    learner_nodes=1,
    gpus_per_node=8,
    memory_gib_per_node=64,
    image="rlcore:cuda",
    claim="runs",
    secret="wandb",
    env={"A": "b c"},
    node_selector={"gpu": "h200"},
    fs_group=1000,
    tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    image_pull_secrets=["registry"],
    labels={"kueue.x-k8s.io/queue-name": "team"},
)


LEAST = LaunchSpec(kind="kubernetes", nodes=4, memory_gib_per_node=8, image="i", claim="c")
# the oldest version that docs/scaling.md names, and the newest that was seen
DEFINITIONS = {
    path.stem.removeprefix("rayjob_crd_"): json.loads(path.read_text())
    for path in sorted(Path(__file__).parent.glob("rayjob_crd_*.json"))
}


@pytest.fixture(autouse=True)
def user(monkeypatch):
    """Its name is in that of the job."""
    monkeypatch.setenv("LOGNAME", "me")


def manifest(settings, run_dir="/data/My_Run 1", words=WORDS):
    (text,) = render(settings, words, run_dir).files.values()
    return yaml.safe_load(text)


def test_the_ray_job_holds_the_command_the_roles_and_the_volume():
    job = manifest(KUBERNETES)
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert re.fullmatch("rlcore-me-my-run-1-[0-9a-f]{6}", job["metadata"]["name"])
    again = ["resume=auto", "takeover_after_s=60"]
    assert shlex.split(spec["entrypoint"]) == ["rlcore", "train", *WORDS, *again]
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP" and cluster["authOptions"] == {
        "mode": "token"
    }
    learner, actors = cluster["workerGroupSpecs"]
    assert (learner["replicas"], actors["replicas"]) == (1, 2)
    for group, resource in ((learner, "rlcore_learner"), (actors, "rlcore_actor")):
        # KubeRay writes the parameter into a shell command
        (word,) = shlex.split(group["rayStartParams"]["resources"])
        assert json.loads(word) == {resource: 1000}
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert (
            container["image"] == "rlcore:cuda"
            and container["resources"]["limits"]["nvidia.com/gpu"] == 8
        )
        assert container["env"] == [{"name": "A", "value": "b c"}]
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        mounted = {m["name"] for m in container["volumeMounts"]}
        assert mounted == {v["name"] for v in pod["volumes"]} == {"run", "shm"}
        assert pod["nodeSelector"] == {"gpu": "h200"}
        assert pod["securityContext"] == {"fsGroup": 1000}
        assert pod["tolerations"][0]["effect"] == "NoSchedule"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert job["metadata"]["labels"] == {
        "app.kubernetes.io/name": "rlcore",
        "kueue.x-k8s.io/queue-name": "team",
    }
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]


FOLDERS = ["/data/run", "/data/a/run", "/data/Run", f"/data/{'long' * 20}", "/data/ü"]


def test_a_job_is_of_one_user_and_one_folder(monkeypatch):
    names = set()
    for who in ("me", "A. B@c", "me2", "x" * 60):
        monkeypatch.setenv("LOGNAME", who)
        names |= {job_name(folder) for folder in FOLDERS}
        assert job_name(FOLDERS[0]) == job_name(FOLDERS[0])
    assert len(names) == 4 * len(FOLDERS)
    assert all(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", n) and len(n) <= 47 for n in names)


def test_a_user_without_a_name_has_a_number(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert job_name("/data/run").startswith(f"rlcore-{os.getuid()}-run-")


def test_the_head_names_ray_s_ports_with_any_other():
    """KubeRay's service has only the ports that the container names, if it names one."""
    for spec in (KUBERNETES, with_metrics_port(KUBERNETES, 9464)):
        cluster = manifest(spec)["spec"]["rayClusterSpec"]
        head, *workers = (
            group["template"]["spec"]["containers"][0].get("ports", [])
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        )
        found = {port["name"]: port["containerPort"] for port in head}
        own = {"rlcore": 9464} if spec is not KUBERNETES else {}
        assert found == HEAD_PORTS | own
        assert all(
            ports == [{"name": n, "containerPort": p} for n, p in own.items()] for ports in workers
        )


def test_the_head_and_the_learner_have_amounts_of_their_own():
    own = {"learner_memory_gib_per_node": 512, "learner_cpus_per_node": 64, "head_cpus": 6}
    spec = KUBERNETES.model_copy(update=own | {"learner_gpus_per_node": 0, "head_memory_gib": 24})
    cluster = manifest(spec)["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    found = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in groups]
    assert found == [
        {"cpu": "6", "memory": "24Gi"},
        {"cpu": "64", "memory": "512Gi"},
        {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 8},
    ]


POD_OF_ITS_OWN = {
    "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}},
    "spec": {
        "containers": [
            {
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "ports": [{"name": "rlcore", "containerPort": 9464}],
                "resources": {"limits": {"rdma/hca": 1}},
            }
        ],
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}],
    },
}


@pytest.mark.parametrize("kuberay", DEFINITIONS)
def test_what_a_pod_is_given_is_merged_into_every_pod(kuberay):
    job = manifest(KUBERNETES.model_copy(update={"pod": POD_OF_ITS_OWN}))
    jsonschema.validate(job, DEFINITIONS[kuberay])
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        assert template["metadata"] == POD_OF_ITS_OWN["metadata"]
        (container,) = template["spec"]["containers"]
        assert container["image"] == "rlcore:cuda"  # what was there stays
        assert container["ports"][-1] == {"name": "rlcore", "containerPort": 9464}
        assert container["resources"]["limits"].keys() >= {"rdma/hca", "memory"}
        assert [t["key"] for t in template["spec"]["tolerations"]] == ["nvidia.com/gpu", "team"]
        shm = template["spec"]["volumes"][1]
        assert shm == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}


def test_gpus_are_not_held_after_the_end():
    assert manifest(KUBERNETES)["spec"]["ttlSecondsAfterFinished"] <= 60


@pytest.mark.parametrize("settings", [KUBERNETES, LEAST], ids=["all", "least"])
@pytest.mark.parametrize("kuberay", DEFINITIONS)
def test_the_ray_job_is_one_by_kuberays_definition(kuberay, settings):
    jsonschema.validate(manifest(settings), DEFINITIONS[kuberay])


POD = ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "backOffLimit"), 3),
        ((*POD, "fsGroup"), 1),
        ((*POD, "containers", 0, "resources", "limits", "memory"), "64 GB"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 4),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "password"),
        (("metadata", "name"), "My_Run"),
    ],
)
def test_a_definition_refuses_what_a_cluster_would(path, value):
    job = manifest(KUBERNETES)
    at = job
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, DEFINITIONS["1.7.0"])


def test_definitions_come_from_a_custom_resource_definition():
    texts = {"type": "object", "properties": {"a": {"type": "string", "description": "of a"}}}
    fields = {"one": texts, "other": {"type": "string", "nullable": True}, "again": texts}
    spec = {"type": "object", "required": ["one"], "properties": fields}
    found = {"type": "object", "properties": {"spec": spec, "status": {"type": "object"}}}
    definition = {
        "group": "ray.io",
        "names": {"kind": "RayJob"},
        "versions": [{"name": "v1", "schema": {"openAPIV3Schema": found}}, {"name": "v1alpha1"}],
    }
    whole = crd.shared(crd.schema({"spec": definition}))
    job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}}
    jsonschema.validate(job | {"spec": {"one": {"a": "b"}, "other": None}}, whole)
    for wrong in ({}, {"one": {"a": 1}}, {"one": {"b": "c"}}, {"one": {}, "again": {"b": "c"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(job | {"spec": wrong}, whole)


def test_an_unknown_field_of_a_toleration_is_refused():
    with pytest.raises(UserError, match=r"tolerations.effects is not a field of a toleration"):
        LaunchSpec(kind="kubernetes", tolerations=[{"effects": "NoSchedule"}]).check(
            "cluster.launch"
        )


def test_without_learner_nodes_all_workers_are_alike():
    (group,) = manifest(LEAST)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == 4 and "resources" not in group["rayStartParams"]


BASE = KUSTOMIZE / "base/rayjob.yaml"


def test_the_base_is_what_the_command_in_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    header = [line[2:] for line in BASE.read_text().splitlines() if line.startswith("# ")]
    command = shlex.split(" ".join(header[1:]))
    assert command[0] == "rlcore" and main(command[1:]) == 0
    printed = capsys.readouterr().out.partition("\n# command\n")[0]
    assert yaml.safe_load(BASE.read_text()) == yaml.safe_load(printed)


@pytest.mark.parametrize("kuberay", DEFINITIONS)
def test_the_base_is_a_ray_job_by_kuberays_definition(kuberay):
    assert yaml.safe_load((BASE.parent / "kustomization.yaml").read_text())["resources"] == [
        BASE.name
    ]
    jsonschema.validate(yaml.safe_load(BASE.read_text()), DEFINITIONS[kuberay])


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl builds the overlay")
def test_the_teams_overlay_is_what_the_settings_in_its_comments_give():
    """Built by kubectl: base and patches together equal what `rlcore launch` renders."""
    settings = LaunchSpec(
        kind="kubernetes",
        nodes=4,
        learner_nodes=2,
        gpus_per_node=8,
        cpus_per_node=64,
        memory_gib_per_node=512,
        learner_memory_gib_per_node=768,
        head_cpus=16,
        head_memory_gib=64,
        image="registry.example.com/rlcore:cuda",
        claim="team-runs",
        namespace="team",
        fs_group=1000,
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        image_pull_secrets=["registry"],
        labels={"kueue.x-k8s.io/queue-name": "team"},
    )
    built = subprocess.run(
        ["kubectl", "kustomize", KUSTOMIZE / "team"], capture_output=True, check=True
    )
    job = yaml.safe_load(built.stdout)
    jsonschema.validate(job, DEFINITIONS["1.7.0"])
    program, verb, *words = shlex.split(job["spec"]["entrypoint"])
    assert (program, verb) == ("rlcore", "train")
    del job["metadata"]["name"]  # which the team chooses
    expected = manifest(settings, "/data/fp8-on-four-nodes", words)
    del expected["metadata"]["name"]
    assert job == expected
    config = load([word for word in words if not word.startswith(("resume=", "takeover_after_s="))])
    assert config.run_dir == "/data/fp8-on-four-nodes"
    assert config.cluster.launch.learner_nodes == settings.learner_nodes
