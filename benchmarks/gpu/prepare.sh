#!/usr/bin/env bash
# bash benchmarks/gpu/prepare.sh OUT [FOLDER ...]: all that a machine with one GPU, Python 3.12, CUDA 13's libraries and
# no network needs: OUT/00, 01, ... (packages, 40 MiB each) and OUT/base (this folder, zstd, the project's archive, and
# FOLDERs, such as a model or rows). $PY312 is a Python 3.12, by default python3.12.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
mkdir -p "$1" && out=$(cd "$1" && pwd) && shift
py=${PY312:-python3.12}
if [ ! -d "$out/SITE/vllm" ]; then
  "$py" "$here/pack.py" --requirements > "$out/requirements.txt"
  DS_BUILD_OPS=0 "$py" -m pip install -q --no-deps --no-compile --target "$out/SITE" -r "$out/requirements.txt"
fi
for folder in "$@"; do cp -r "$folder" "$out/SITE/"; done
rm -rf "$out"/[0-9][0-9] "$out/base"
"$py" "$here/pack.py" "$out/SITE" "$out" --limit-mb 40
mkdir -p "$out/base/bin"
cp "$here/unpack.sh" "$here/env.sh" "$out/base/"
git -C "$project" archive --format=tar HEAD | xz -6 -T0 > "$out/base/project.tar.xz"
if zstd=$(command -v zstd); then
  cp "$zstd" "$out/base/bin/"
  ldd "$zstd" | grep -oE '/[^ ]*lib(zstd|lzma|lz4|z)\.so[^ ]*' | xargs -I{} cp -L {} "$out/base/bin/"
fi
find "$out"/[0-9]* -type f | wc -l > "$out/base/count"
du -sh "$out"/[0-9]* "$out/base"
