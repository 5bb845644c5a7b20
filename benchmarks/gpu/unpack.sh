#!/usr/bin/env bash
# Unpack what pack.py made, on the other machine:
#   bash unpack.sh FOLDER            starts unpacking a folder of pieces that has arrived
#   bash unpack.sh all COUNT SITE    waits for all pieces, and makes SITE of them, compiled
#
# Pieces are kept in $STORE (default /tmp/rlcore-pieces). zstd may be in bin/ beside this script. CUDA's libraries but NCCL are the machine's own,
# of the packages that its python3 has: SITE's torch finds them through links.
set -euo pipefail
store=${STORE:-/tmp/rlcore-pieces}
mkdir -p "$store"
here=$(cd "$(dirname "$0")" && pwd)
zstd=zstd
command -v zstd > /dev/null || zstd="env LD_LIBRARY_PATH=$here/bin $here/bin/zstd"
if [ "$1" != all ]; then
  for piece in "$1"/c*; do
    file=$(basename "$piece") name=$(basename "${piece%.*}")
    tool=xz
    [ "${file##*.}" = xz ] || tool=$zstd
    cp "$piece" "$store/"
    setsid sh -c "cd '$store' && $tool -qdc $file > $name.part && mv $name.part $name && rm $file" \
      > /dev/null 2>&1 < /dev/null &
  done
  exit
fi
count=$2 site=$3
whole() { find "$store" -name 'c???' | wc -l; }
for _ in $(seq 600); do
  [ "$(whole)" -ge "$count" ] && break
  sleep 0.2
done
[ "$(whole)" -eq "$count" ] || { echo "$(whole) of $count pieces are there" >&2; exit 3; }
mkdir -p "$site"
find "$store" -name 'c???' | sort | xargs cat | tar x -C "$site"
rm -r "$store"
cuda=$(env -u PYTHONPATH python3 -c 'import nvidia; print(next(iter(nvidia.__path__)))' || true)
for folder in ${cuda:+"$cuda"/*}; do
  name=$(basename "$folder")
  [ -e "$site/nvidia/$name" ] || { mkdir -p "$site/nvidia"; ln -s "$folder" "$site/nvidia/$name"; }
done
env -u PYTHONDONTWRITEBYTECODE python3 -m compileall -q -j 0 "$site" > "$site/compile.log" 2>&1 || true
echo "$site has $count pieces"
