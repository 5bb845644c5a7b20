"""Make an installed site folder small enough to carry to a machine without a network.

    python benchmarks/gpu/pack.py --requirements > FILE     # what is to be installed into SITE
    python benchmarks/gpu/pack.py SITE OUT [--architecture 90] [--limit-mb 40] [--torch LIB]

SITE is what `pip install --no-deps --target SITE -r FILE` made, for the other machine's Python; the
whole of it is `prepare.sh`. Code for other GPUs inside shared libraries becomes zeros, which
compress away; Triton's library loses its symbols; what no check uses is removed. OUT gets a folder
of at most the limit for each journey, of pieces that are unpacked beside each other:

    bash benchmarks/gpu/unpack.sh OUT/00         # there, for each folder that arrives
    bash benchmarks/gpu/unpack.sh all COUNT SITE # there, last; COUNT: of all pieces

Pieces are compressed by zstd where it is installed, which unpacks several times faster, else by xz.

Nothing else of a library changes, not even its size. It serves GPUs of that architecture alone.

With --torch, the folder torch/lib of the version that the other machine has, a vLLM that was built
for another version is packed, too: its extensions are linked to symbols of torch that are stable
over versions. One that wants a symbol which that torch lacks is removed and named; a library that
vLLM cannot do without ends the command.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MAGIC = 0xBA55ED50  # of NVIDIA's fat binaries
MACHINE_CODE = 2  # an entry's kind; 1 is PTX
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
# parts of the names by which extensions call torch
TORCH_NAMES = ("torch", "c10", "N2at", "aoti_")
# FlashAttention 3 serves Hopper GPUs; the rest no check uses
UNUSED = (
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/deep_gemm/include",
    "vllm/entrypoints/serve/instrumentator/static",
    "flashinfer",
    "mistral_common/data",
    "anthropic",
    "ray/jars",
    "ray/rllib",
    "ray/tune",
    "ray/serve",
    "ray/cpp",
    "ray/dashboard/client",
    "pycountry/locales",
    "torch/include",
    "torch/share",
    "torch/bin/protoc",
    "torch/bin/protoc-3.13.0.0",
    "triton/backends/amd/lib",
    "triton/backends/nvidia/lib/cupti",
    "triton/backends/nvidia/bin/ptxas-blackwell",
    "triton/FileCheck",
    "triton/instrumentation",
    "triton/plugins",
    "triton/_C/libproton.so",
    "nvidia/nccl/include",
)
# of requirements/cuda.lock: what the other machine has and no path looks at, and what only kernels
# need that no check uses; of the packages nvidia-*, all but these
LEFT_OUT = """
aiohttp-cors colorful cuda-bindings cuda-core cuda-pathfinder cuda-python cuda-tile cuda-toolkit
distlib flashinfer-python google-api-core google-auth humming-kernels llvmlite ml-dtypes ninja numba
numpy opencensus opencensus-context opencv-python-headless opentelemetry-exporter-prometheus pillow
platformdirs proto-plus py-spy pyarrow pyasn1 pyasn1-modules pynvvideocodec python-discovery
setuptools six smart-open tilelang tokenspeed-mla tokenspeed-triton torch-c-dlpack-ext torchaudio
torchcodec virtualenv wheel wrapt z3-solver
""".split()  # noqa: SIM905
NVIDIA = ("nvidia-nccl-cu13", "nvidia-ml-py", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base")
NVIDIA += ("nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu13")
# beside the lock: TRL (beside_trl.py), Liger's kernels and FP8 products (layers.py)
FURTHER = (
    *("trl==1.16.0", "datasets==5.2.0", "multiprocess==0.70.19"),
    *("liger-kernel==0.8.5", "torchao==0.18.0"),
)
ROOT = Path(__file__).resolve().parents[2]
PIECE = 38 << 20  # bytes of the archive that are compressed together: any of them fits a folder
COMPRESSORS = {"zstd": ("zstd", "-q", "-6", "--rm"), "xz": ("xz", "-6")}


def carried(lock: str) -> list[str]:
    """The requirements of a lock file's text that are carried, and `FURTHER`."""
    found = re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;]+)", lock, re.M)
    names = [(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in found]
    kept = [
        f"{name}=={version}"
        for name, version in names
        if name not in LEFT_OUT and (not name.startswith("nvidia-") or name in NVIDIA)
    ]
    return [*kept, *FURTHER]


def unloadable(site: Path, torch: Path) -> dict[Path, str]:
    """Extensions of vLLM that want a symbol of torch which the libraries in `torch` lack, with the
    first such symbol. By the names that the linker reads (`nm -D`)."""
    there = symbols("--defined-only", *torch.glob("*.so*"))
    found = {}
    for library in sorted((site / "vllm").rglob("*.so")):
        lacking = [
            name
            for name in symbols("--undefined-only", library) - there
            if any(word in name for word in TORCH_NAMES)
        ]
        if lacking:
            found[library] = min(lacking)
    return found


def symbols(which: str, *libraries: Path) -> set[str]:
    """Names of dynamic symbols without their versions; weak ones may be missing and do not
    count."""
    command = ["nm", "-D", which, *map(str, libraries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"nm cannot read the libraries: {done.stderr.strip()}")
    lines = (line.split() for line in done.stdout.splitlines())
    return {w[-1].partition("@")[0] for w in lines if len(w) > 1 and w[-2] not in ("w", "v")}


def drop_unloadable(site: Path, torch: Path) -> None:
    """Remove what vLLM does without, and end where it does not."""
    for library, symbol in unloadable(site, torch).items():
        name = str(library.relative_to(site))
        if name in LIBRARIES:
            sys.exit(f"{name} wants {symbol}, which the torch in {torch} lacks")
        library.unlink()
        print(f"{name}: removed, wants {symbol}")


def blank_other_code(data: bytearray, architecture: int) -> int:
    """Zero the GPU code of a library that `architecture` (90: Hopper) cannot run; bytes zeroed.

    A fat binary is a header (magic, version u16, header size u16, size u64) and entries: kind u16,
    u16, header size u32, size u64, and the architecture, a u32 at byte 28. Its form is not
    documented; this is how CUDA 13's are.
    """
    zeroed, at = 0, data.find(struct.pack("<I", MAGIC))
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        end = at + header + size
        if version == 1 and header == 16 and end <= len(data):
            entry = at + header
            while entry < end:
                kind, _, head, length = struct.unpack_from("<HHIQ", data, entry)
                (found,) = struct.unpack_from("<I", data, entry + 28)
                if entry + head + length > end:
                    break  # no entry: the header's bytes by chance
                if (kind, found) != (MACHINE_CODE, architecture):
                    data[entry + head : entry + head + length] = bytes(length)
                    zeroed += length
                entry += head + length
        else:
            end = at + 4  # the same four bytes by chance
        at = data.find(struct.pack("<I", MAGIC), end)
    return zeroed


def prune(site: Path, architecture: int) -> None:
    """Remove what no check uses, other GPUs' code, and Triton's symbols."""
    for name in UNUSED:
        path = site / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for library in sorted(site.rglob("*.so*")):
        if library.is_symlink() or not library.is_file():
            continue
        data = bytearray(library.read_bytes())
        if zeroed := blank_other_code(data, architecture):
            library.write_bytes(data)
            name = library.relative_to(site)
            print(f"{name}: {zeroed / 2**20:.0f} of {len(data) / 2**20:.0f} MiB zeroed")
    compiler = site / "triton/_C/libtriton.so"
    if compiler.exists():
        subprocess.run(["strip", "--strip-unneeded", compiler], check=True, timeout=300)


def pack(site: Path, out: Path, limit: int, piece: int = PIECE, by: str | None = None) -> None:
    """Write the folder as one archive cut into pieces, each compressed by itself, and put them into
    folders of at most `limit` bytes. `by`: a compressor's name; None: the one that is there."""
    command = COMPRESSORS[by or ("zstd" if shutil.which("zstd") else "xz")]
    out.mkdir(parents=True, exist_ok=True)
    archive = out / "site.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(site, ".", filter=lambda m: None if "__pycache__" in m.name else m)
    subprocess.run(["split", "-b", str(piece), "-d", "-a", "3", archive, out / "c"], check=True)
    archive.unlink()
    pieces = sorted(out.glob("c*"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda p: subprocess.run([*command, p], check=True), pieces))
    folders = journeys({p: p.stat().st_size for p in out.glob("c*.*")}, limit)
    for i, names in enumerate(folders):
        folder = out / f"{i:02d}"
        folder.mkdir()
        for path in names:
            path.rename(folder / path.name)
        print(f"{folder.name}: {sum(p.stat().st_size for p in folder.iterdir()) / 2**20:.0f} MiB")
    print(f"{len(pieces)} pieces in all")


def journeys(sizes: Mapping[Path, int], limit: int) -> list[list[Path]]:
    """Distribute files among as few folders of at most `limit` bytes as the largest first finds.

    Exits where one file alone is larger.
    """
    found: list[tuple[int, list[Path]]] = []
    for path, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if size > limit:
            sys.exit(f"{path.name} has {size} bytes, above the limit of {limit}")
        at = next((i for i, (held, _) in enumerate(found) if held + size <= limit), None)
        if at is None:
            found.append((size, [path]))
        else:
            held, names = found[at]
            found[at] = (held + size, [*names, path])
    return [names for _, names in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--requirements", action="store_true", help="print what is to be installed")
    parser.add_argument("--architecture", type=int, default=90)
    parser.add_argument("--limit-mb", type=int, default=40)
    parser.add_argument("--torch", type=Path, help="torch/lib of the other machine's version")
    args = parser.parse_args()
    if args.requirements:
        print("\n".join(carried((ROOT / "requirements/cuda.lock").read_text())))
        return
    if args.site is None or args.out is None:
        sys.exit("SITE and OUT are missing")
    if args.torch is not None:
        drop_unloadable(args.site, args.torch)
    prune(args.site, args.architecture)
    pack(args.site, args.out, args.limit_mb << 20)


if __name__ == "__main__":
    main()
