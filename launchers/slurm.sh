# Body of the Slurm batch script; `rlcore launch cluster=slurm` puts the options and values of a run
# above it. It runs on the first node of the allocation, which is also Ray's head. The dashboard is
# off; Ray's own ports are open to the allocation's network and accept only this job's token.
set -euo pipefail

RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_ip=${RLCORE_HEAD_IP:-$(hostname -I | awk '{print $1}')}
# Jobs that share a node must not share a port.
address=$head_ip:$((20000 + SLURM_JOB_ID % 20000))
stopping=0
ray_pids=()
driver=

stop_ray() {
  trap - EXIT
  if ((${#ray_pids[@]})); then
    kill -TERM "${ray_pids[@]}" 2>/dev/null || true
    wait "${ray_pids[@]}" 2>/dev/null || true
  fi
}
trap stop_ray EXIT
# SIGTERM comes grace_s before the end of the allocation: the run writes a checkpoint and ends.
trap 'stopping=1; [ -n "$driver" ] && kill -TERM "$driver" 2>/dev/null || true' TERM INT

resources() { # of the node with this index
  if ((learner_nodes == 0)); then
    echo '{}'
  elif (($1 < learner_nodes)); then
    echo "$learner_resources"
  else
    echo "$actor_resources"
  fi
}

node=(--num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats --block)
"${inside[@]}" ray start --head --node-ip-address="$head_ip" --port="${address##*:}" --include-dashboard=false \
  --resources="$(resources 0)" "${node[@]}" &
ray_pids+=($!)
for ((i = 1; i < ${#hosts[@]}; i++)); do
  srun --nodes=1 --ntasks=1 --nodelist="${hosts[i]}" "${across[@]}" \
    ray start --address="$address" --resources="$(resources "$i")" "${node[@]}" &
  ray_pids+=($!)
done

# The run counts the cluster's CPUs and GPUs at its start, so every node must have joined by then.
"${inside[@]}" python - "$address" "${#hosts[@]}" "$start_timeout_s" <<'PY' &
import sys
import time

import ray

address, wanted, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline = time.monotonic() + limit
joined = 0
while joined < wanted:
    if time.monotonic() > deadline:
        key = f"cluster.launch.start_timeout_s={limit:g}"
        sys.exit(f"rlcore: {joined} of {wanted} nodes joined Ray within {key}")
    try:
        quiet = {"logging_level": "ERROR", "log_to_driver": False, "ignore_reinit_error": True}
        ray.init(address=address, **quiet)
        joined = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        pass
    time.sleep(1)
PY
wait $!

"${inside[@]}" "${command[@]}" cluster.address="$address" &
driver=$!
if ((stopping)); then kill -TERM "$driver" 2>/dev/null || true; fi
while # a trapped signal ends `wait` early, with a code of its own
  wait "$driver" && code=0 || code=$?
  kill -0 "$driver" 2>/dev/null
do :; done
wait "$driver" && code=0 || code=$? # the run's, which bash keeps
# A run that was stopped by a signal or that failed continues from its newest checkpoint, at most
# `retries` times.
if ((code != 0 && (stopping || code == 1) && ${SLURM_RESTART_COUNT:-0} < retries)); then
  scontrol requeue "$SLURM_JOB_ID" # the command says resume=auto
fi
exit "$code"
