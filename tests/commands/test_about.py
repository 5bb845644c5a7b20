"""What a run notes about the machine and the source that it is done with."""

import getpass
import json
import socket

import pytest

from rlcore.cluster.cpu.kernels import KERNELS, Kernels
from rlcore.commands.about import about, kernel_news, limit_facts, run_kernels, write_about
from rlcore.config.compose import load


def test_it_has_machine_and_versions_and_nothing_private(tmp_path):
    kernels = Kernels("AVX512", "tried", {"": 71.0, "AVX512": 97.0})
    limit = {"gflops": 194.0}
    write_about(tmp_path, kernels, limit)
    found = json.loads((tmp_path / "about.json").read_text())
    assert found == about(kernels, limit)
    assert found["limit"] == limit and about()["limit"] is None
    assert found["kernels"] == {"chosen": "AVX512", "gflops": 97.0}
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_gib"] > 0
    assert {"python", "torch", "ray"} <= set(found["versions"])
    text = json.dumps(found)
    assert socket.gethostname() not in text and str(tmp_path) not in text
    assert f'"{getpass.getuser()}"' not in text


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Trials that find AVX-512 faster, of a processor that has it, and their number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(KERNELS, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    info = tmp_path / "cpuinfo"
    info.write_text("vendor_id : AuthenticAMD\nflags : avx2 avx512f\n")
    monkeypatch.setattr("rlcore.cluster.cpu.kernels.Processor.here.__func__.__defaults__", (info,))
    asked = []

    def speed(candidate, shapes):
        asked.append(shapes)
        return 97.0 if candidate == "AVX512" else 71.0

    monkeypatch.setattr("rlcore.cluster.cpu.kernels.tried_speed", speed)
    return asked


def test_a_run_goes_on_with_the_kernels_that_it_began_with(tried, tmp_path):
    config = load(["experiment=quickstart", "run_dir=run", "schedule=on_policy"])
    assert run_kernels(config, trial=False).source == "unknown"
    kernels = run_kernels(config)
    assert (kernels.chosen, kernels.source) == ("AVX512", "tried") and len(tried) == 3
    assert len(tried[0]) == 4 and (512, 192) in tried[0]  # the fresh model's own
    assert [*kernel_news(config, kernels)] == [f"matrix kernels: {kernels}"]
    (tmp_path / "run").mkdir()
    write_about(tmp_path / "run", kernels, {})
    (tmp_path / "cache" / "kernels.json").unlink()
    again = run_kernels(config)
    assert (again.chosen, again.source) == ("AVX512", "run") and len(tried) == 3
    assert len([*kernel_news(config, again)]) == 1
    other = Kernels("AVX2", "environment")
    assert "begun with the kernels AVX512: sums round otherwise" in [*kernel_news(config, other)][1]
    timed = load(["experiment=quickstart", "run_dir=run"])  # its results depend on timing anyway
    assert len([*kernel_news(timed, other)]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("cluster.address=head:6379",),
        ("learner=gpu", "actor=gpu"),
        ("cluster.cpu_fast_paths=false",),
    ],
)
def test_kernels_of_other_machines_and_gpus_are_not_tried(tried, words):
    words = [w.replace("actor=gpu", "actor.bf16.num_gpus=1") for w in words]
    assert run_kernels(load(["experiment=quickstart", "run_dir=run", *words])) is None
    assert tried == []


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ((), True),
        (("learner=lora",), False),
        (("learner.dtype=bfloat16", "learner.zero_stage=1"), False),
        (("actor.bf16.num_gpus=1",), False),
    ],
)
def test_a_limit_is_of_runs_whose_products_are_those_that_were_tried(words, known):
    config = load(["experiment=quickstart", "run_dir=run", *words])
    kernels = Kernels("AVX512", "tried", {"": 71.0, "AVX512": 97.0})
    found = limit_facts(config, "0123456789=ab", kernels)  # thirteen tokens
    assert bool(found) == known and limit_facts(config, "0", Kernels("", "unknown")) == {}
    if known:
        assert found["gflops"] % 97.0 == 0 and found["samples"] == 8
        assert found["trained_gflop"] == pytest.approx(3 * found["pass_gflop"])
        assert 1.5e6 < found["pass_gflop"] / 2 * 1e9 < 1.7e6  # the fresh model's parameters
