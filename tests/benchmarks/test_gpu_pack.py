"""Carrying the GPU check's packages: other GPUs' code is zeroed, nothing else changes."""

import os
import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pack
import pytest


def entry(kind, architecture, code):
    return struct.pack("<HHIQ12xI", kind, 1, 64, len(code), architecture).ljust(64, b"h") + code


def fat_binary(*entries):
    whole = b"".join(entries)
    return struct.pack("<IHHQ", pack.MAGIC, 1, 16, len(whole)) + whole


def test_only_other_architectures_code_is_zeroed():
    kept, ptx, other = b"hopper" * 9, b"ptx" * 40, b"ampere" * 30
    chance = struct.pack("<I", pack.MAGIC)  # the magic number inside ordinary data
    header = struct.pack("<IHHQ", pack.MAGIC, 1, 16, 64)  # and a whole header before other data
    parts = [
        b"elf" + chance + b"\xff" * 40,
        header + b"\xff" * 64,
        fat_binary(entry(2, 80, other), entry(2, 90, kept), entry(1, 90, ptx)),
        b"between",
        fat_binary(entry(2, 90, kept)),
        b"end",
    ]
    data = bytearray(b"".join(parts))
    assert pack.blank_other_code(data, 90) == len(ptx) + len(other)
    wanted = b"".join(parts).replace(other, bytes(len(other))).replace(ptx, bytes(len(ptx)))
    assert bytes(data) == wanted


TORCH_A = "int torch_sum() { return 1; } int torch_new() { return 2; }"
TORCH_B = "int torch_sum() { return 1; }"  # of an older version


def library(path, code, *flags):
    """A shared library of some lines of C."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *flags]
    subprocess.run(command, input=code, text=True, check=True, timeout=60)


@pytest.mark.processes
@pytest.mark.parametrize("torch, removed", [(TORCH_A, False), (TORCH_B, True)])
def test_extensions_that_the_other_torch_cannot_load_are_removed(tmp_path, torch, removed, capsys):
    site, lib = tmp_path / "site", tmp_path / "lib"
    library(lib / "libtorch.so", torch)
    needed = site / "vllm/_C_stable_libtorch.abi3.so"
    library(needed, "int torch_sum(); int puts(const char *); int f() { return torch_sum(); }")
    optional = site / "vllm/third_party/_other.so"
    library(optional, "int torch_new(); int f() { return torch_new(); }")
    weak = site / "vllm/_weak.so"
    library(weak, "__attribute__((weak)) int torch_gone(); int f() { return torch_gone(); }")
    pack.drop_unloadable(site, lib)
    assert optional.exists() != removed and needed.exists() and weak.exists()
    said = capsys.readouterr().out
    assert said == ("vllm/third_party/_other.so: removed, wants torch_new\n" if removed else "")
    library(needed, "int torch_new(); int f() { return torch_new(); }")
    if removed:
        with pytest.raises(SystemExit, match=r"_C_stable_libtorch.* wants torch_new"):
            pack.drop_unloadable(site, lib)


UNPACK = Path(pack.__file__).parent / "unpack.sh"


def unpack(store, *words):
    return subprocess.run(
        ["bash", UNPACK, *map(str, words)],
        env=os.environ | {"STORE": str(store)},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_what_is_carried_is_of_the_lock_and_what_is_left_out_is_in_it():
    lock = (pack.ROOT / "requirements/cuda.lock").read_text()
    names = {line.partition("==")[0] for line in pack.carried(lock)}
    assert {"torch", "vllm", "ray", "deepspeed", "triton", "trl", *pack.NVIDIA} <= names
    assert not names & {*pack.LEFT_OUT}
    locked = {
        re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)", lock, re.M)
    }
    assert {*pack.LEFT_OUT} <= locked


@pytest.mark.processes
@pytest.mark.parametrize("by", pack.COMPRESSORS)
def test_pieces_that_arrive_in_any_order_are_the_folder(by, tmp_path):
    if shutil.which(by) is None:
        pytest.skip(f"{by} is not installed")
    site, out, there = tmp_path / "site", tmp_path / "out", tmp_path / "there"
    (site / "package" / "__pycache__").mkdir(parents=True)
    (site / "package" / "a.py").write_text("x = 1\n")
    (site / "package" / "b.bin").write_bytes(random.Random(0).randbytes(9000))
    (site / "package" / "__pycache__" / "a.pyc").write_text("compiled")
    pack.pack(site, out, limit=5000, piece=4096, by=by)
    folders = sorted(out.iterdir(), reverse=True)
    count = len([*out.rglob("c*.*")])
    assert len(folders) > 1
    for folder in folders:
        assert unpack(tmp_path / "store", folder).returncode == 0
    done = unpack(tmp_path / "store", "all", count, there)
    assert done.returncode == 0, done.stderr
    for name in ("a.py", "b.bin"):
        assert (there / "package" / name).read_bytes() == (site / "package" / name).read_bytes()
    assert (there / "package/__pycache__").exists()  # made there, not carried
    assert not (there / "package/__pycache__/a.pyc").exists()


def test_a_folder_holds_no_more_than_a_journey_takes():
    sizes = {Path(name): size for name, size in {"a": 6, "b": 5, "c": 4, "d": 3}.items()}
    found = pack.journeys(sizes, 10)
    assert sorted(p for names in found for p in names) == sorted(sizes)
    assert all(sum(sizes[p] for p in names) <= 10 for names in found) and len(found) == 2
    with pytest.raises(SystemExit, match="above the limit of 5"):
        pack.journeys(sizes, 5)
