"""The matrix kernels that a run's processes are set to: by a trial that is kept."""

import json
import os

import pytest

from rlcore.cluster.cpu.kernels import (
    KERNELS,
    OWN,
    Processor,
    choose,
    common_shapes,
    kernels_for,
    tried_speed,
)

AMD = Processor("AuthenticAMD", frozenset({"avx2", "avx512f"}), "EPYC")
SHAPES = ((384, 128), (128, 384))


def speeds(**found):
    """A trial that finds these speeds, and the candidates that it was asked for."""
    asked = []

    def speed(candidate, shapes):
        assert shapes == SHAPES
        asked.append(candidate)
        return found.get(candidate or "own")

    return speed, asked


def found(kept, trial, processor=AMD, environment=None, run=None):
    return kernels_for(
        SHAPES, kept, run=run, environment=environment or {}, processor=processor, speed=trial
    )


@pytest.mark.parametrize(
    ("gflops", "chosen"),
    [
        ({OWN: 71.0, "AVX512": 97.0, "AVX2": 72.0}, "AVX512"),
        ({OWN: 71.0, "AVX512": 75.0, "AVX2": 72.0}, OWN),  # no more than noise
        ({OWN: 97.0, "AVX512": 71.0}, OWN),
        ({OWN: 40.0, "AVX2": 71.0}, "AVX2"),
        ({OWN: 97.0}, OWN),
        ({}, OWN),
    ],
)
def test_another_set_is_taken_where_it_is_clearly_faster(gflops, chosen):
    assert choose(gflops) == chosen


def test_a_trial_is_made_once_for_a_processor_and_shapes(tmp_path):
    kept = tmp_path / "cache" / "kernels.json"
    trial, asked = speeds(own=71.0, AVX512=97.0, AVX2=72.0)
    first = found(kept, trial)
    assert (first.chosen, first.source, first.speed) == ("AVX512", "tried", 97.0)
    assert asked == [OWN, "AVX512", "AVX2"]
    second = found(kept, trial)
    assert (second.chosen, second.source, second.gflops) == ("AVX512", "kept", first.gflops)
    assert len(asked) == 3
    other = Processor("AuthenticAMD", AMD.features, "another")
    assert found(kept, speeds(own=71.0)[0], other).chosen == OWN
    assert len(json.loads(kept.read_text())) == 2 and found(kept, trial).source == "kept"


def test_sets_that_a_processor_lacks_are_not_tried(tmp_path):
    trial, asked = speeds(own=30.0, AVX2=72.0)
    plain = Processor("AuthenticAMD", frozenset({"avx2"}))
    assert found(tmp_path / "k", trial, plain).chosen == "AVX2" and asked == [OWN, "AVX2"]
    for nothing in (Processor("", frozenset()), Processor("ARM", frozenset({"neon"}))):
        assert found(tmp_path / "k", None, nothing).source == "unknown"
    # a library of torch without MKL
    without = found(tmp_path / "none", speeds()[0])
    assert (without.chosen, without.source) == (OWN, "unknown")
    assert not (tmp_path / "none").exists()


def test_the_environment_comes_first_then_what_the_run_began_with(tmp_path):
    kept = tmp_path / "kernels.json"
    trial, _ = speeds(own=71.0, AVX512=97.0)
    found(kept, trial)
    asked = found(kept, trial, environment={KERNELS: "AVX2"}, run="AVX512")
    assert (asked.chosen, asked.source) == ("AVX2", "environment")
    again = found(kept, trial, run=OWN)
    assert (again.chosen, again.source, again.speed) == (OWN, "run", 71.0)
    # the run went to a machine that lacks them
    small = Processor("GenuineIntel", frozenset({"avx2"}))
    moved = found(kept, speeds(own=60.0, AVX2=60.0)[0], small, run="AVX512")
    assert (moved.chosen, moved.source) == (OWN, "tried")


def test_a_choice_reaches_processes_and_says_whose_it_is(tmp_path, monkeypatch):
    made = {"HOME": "/"}
    chosen = found(tmp_path / "k", speeds(own=71.0, AVX512=97.0)[0])
    chosen.set_in(made)
    assert made == {"HOME": "/", KERNELS: "AVX512"}
    made[KERNELS] = "AVX2"
    chosen.set_in(made)
    assert made[KERNELS] == "AVX2"
    said = f"{KERNELS}=AVX512, by a trial (GFLOP/s of a thread: own choice 71, AVX512 97)"
    assert str(chosen) == said
    own = found(tmp_path / "o", speeds(own=71.0, AVX2=60.0)[0])
    own.set_in(bare := {})
    assert bare == {}
    monkeypatch.delenv(KERNELS, raising=False)
    with chosen.set_here():  # for processes that are started meanwhile
        assert os.environ[KERNELS] == "AVX512"
    assert KERNELS not in os.environ
    monkeypatch.setenv(KERNELS, "AVX2")
    with chosen.set_here():
        assert os.environ[KERNELS] == "AVX2"
    assert os.environ[KERNELS] == "AVX2"
    assert str(own).startswith("MKL's own choice, by a trial")


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": {"": "x"}}'])
def test_a_damaged_file_is_tried_again(text, tmp_path):
    kept = tmp_path / "kernels.json"
    kept.write_text(text)
    trial, asked = speeds(own=71.0)
    assert found(kept, trial).source == "tried" and asked
    assert found(kept, trial).source == "kept"


def test_a_folder_that_cannot_be_written_costs_a_trial_each_time(tmp_path):
    (tmp_path / "file").write_text("")
    trial, asked = speeds(own=71.0, AVX512=97.0)
    for _ in range(2):
        assert found(tmp_path / "file" / "k", trial).chosen == "AVX512"
    assert len(asked) == 6


def test_the_shapes_with_most_operations_are_tried():
    layer = [(128, 128), (64, 128), (64, 128), (128,), (384, 128), (384, 128), (128, 384)]
    assert common_shapes(layer * 2) == ((64, 128), (128, 128), (128, 384), (384, 128))
    assert common_shapes([(49152, 576), *layer])[-1] == (4096, 576)  # a head's, in part
    assert common_shapes([(5,), (1, 8)]) == ()


def test_a_processor_is_read_from_the_first_core(tmp_path):
    info = tmp_path / "cpuinfo"
    core = (
        "processor : {}\nvendor_id\t: AuthenticAMD\nmodel name : EPYC\nflags\t\t: fpu avx2 {}\n\n"
    )
    info.write_text(core.format(0, "avx512f") + core.format(1, ""))
    here = Processor.here(info)
    assert here == Processor("AuthenticAMD", frozenset({"fpu", "avx2", "avx512f"}), "EPYC///")
    assert here.candidates == (OWN, "AVX512", "AVX2")
    assert Processor.here(tmp_path / "none").candidates == (OWN,)


@pytest.mark.processes
def test_a_real_trial_runs_this_machines_products(monkeypatch):
    monkeypatch.delenv(KERNELS, raising=False)
    before = dict(os.environ)
    speed = tried_speed(OWN, SHAPES)
    if speed is None:
        pytest.skip("this build of torch has no MKL")
    assert 0.1 < speed < 10_000
    assert dict(os.environ) == before
    monkeypatch.setattr("rlcore.cluster.cpu.kernels.sys.executable", "/nowhere/python")
    assert tried_speed(OWN, SHAPES) is None
