# Body of the Slurm batch script; `rlcore launch cluster=slurm` puts the options and values of a run
# above it. It runs on the first node of the allocation, which is also Ray's head. On each node,
# rlcore.launch.node keeps Ray running; Ray's ports accept only this job's token.
#
# SIGUSR1 comes grace_s before the time limit: a checkpoint, then the job is requeued. SIGTERM comes
# from scancel, `rlcore cancel` and preemption: a checkpoint, and only a preempted job is requeued.
set -uo pipefail
ulimit -Sn "$(ulimit -Hn)" # Ray opens a file for each of its connections

stop='' # "again": requeue; "end": do not
watching=''
launch=$run_dir/launch
pid_file=$launch/$SLURM_JOB_ID.pid
failed=$launch/$SLURM_JOB_ID.failed
restarts=$launch/$SLURM_JOB_ID.restarts

tell() { # the run to stop, once it is there
  if [ -s "$pid_file" ]; then kill -TERM "$(< "$pid_file")" 2> /dev/null; fi
}
trap 'stop=${stop:-again}; tell' USR1
trap 'stop=end; tell' TERM INT

over() { # wait for a process; a trapped signal ends `wait` early, with a code of its own
  local code
  while wait "$1" && code=0 || code=$?; kill -0 "$1" 2> /dev/null; do :; done
  wait "$1" && code=0 || code=$? # the process's, which bash keeps
  return "$code"
}

finish() { # Ray ends on all nodes, and its temporary files with it
  if [ "$watching" ]; then kill "$watching" 2> /dev/null; fi
  kill -USR1 "$nodes" 2> /dev/null || return
  for ((i = 0; i < 200; i++)); do
    kill -0 "$nodes" 2> /dev/null || break
    sleep 0.1
  done
}

again() { # requeue, unless the last `retries` restarts have brought no newer checkpoint
  local newest before='' count=0
  newest=$(find "$run_dir/checkpoints" -maxdepth 1 -name 'step_*' -printf '%f\n' 2> /dev/null | sort -V | tail -n 1)
  if [ -s "$restarts" ]; then read -r before count < "$restarts"; fi
  if [ "$before" != "${newest:-none}" ]; then count=0; fi
  if ((count >= retries)); then
    echo "rlcore: not requeued: $count restarts brought no newer checkpoint (cluster.launch.retries=$retries)"
    return
  fi
  echo "${newest:-none} $((count + 1))" > "$restarts"
  scontrol requeue "$SLURM_JOB_ID"
}

preempted() { # by a job that waits; one that is cancelled or requeued is not running any more
  scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING .*PreemptTime=[0-9]'
}

mkdir -p "$launch"
rm -f "$pid_file" "$failed"
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# Nodes that are not alike are parts of a job, the learner's first.
hosts=()
counts=()
for part in "${!cpus[@]}"; do
  list=SLURM_JOB_NODELIST
  if ((${#cpus[@]} > 1)); then list+=_HET_GROUP_$part; fi
  : "${!list:?rlcore: the job needs ${#cpus[@]} parts}"
  mapfile -t found < <(scontrol show hostnames "${!list}")
  hosts+=("${found[@]}")
  counts+=("${#found[@]}")
done
head_ip=$("${inside[@]}" python -m rlcore.launch.address "$interface" "${hosts[1]:-}") || exit 2
# Jobs that share a node must not share a port.
address=$head_ip:$((20000 + SLURM_JOB_ID % 12000))

step=()
for part in "${!cpus[@]}"; do
  if ((part)); then step+=(:); fi
  if ((${#cpus[@]} > 1)); then step+=(--het-group="$part"); fi
  # The step goes on when one of its nodes is lost or gives up.
  step+=(--nodes="${counts[part]}" --ntasks="${counts[part]}" --ntasks-per-node=1
    --cpus-per-task="${cpus[part]}" --mem=0 --overlap --export=ALL --input=none
    --no-kill --kill-on-bad-exit=0 --wait=0 "${across[@]}" python -m rlcore.launch.node
    --address="$address" --cpus="${cpus[part]}" --gpus="${gpus[part]}" --folder="$launch"
    --script=$$ --start-timeout-s="$start_timeout_s" --learner-nodes="$learner_nodes"
    --learner-resources="$learner_resources" --actor-resources="$actor_resources")
done
srun "${step[@]}" &
nodes=$!

# The run counts the cluster's CPUs and GPUs at its start, so every node must have joined by then.
"${inside[@]}" python -m rlcore.cluster.joined wait "$address" "$start_timeout_s" "$failed" "${hosts[@]}" &
joining=$!
while kill -0 "$joining" 2> /dev/null && [ -z "$stop" ]; do wait "$joining"; done
if [ -n "$stop" ]; then
  kill "$joining" 2> /dev/null
  code=130
elif over "$joining"; then
  if ((least)); then # nodes of actors alone may be lost
    "${inside[@]}" python -m rlcore.cluster.joined watch "$address" "$least" $$ "${hosts[@]}" &
    watching=$!
  fi
  # shellcheck disable=SC2016 # the inner shell expands them
  "${inside[@]}" bash -c 'echo $$ > "$1"; exec "${@:2}"' - "$pid_file" \
    "${command[@]}" cluster.address="$address" &
  driver=$!
  until [ -s "$pid_file" ] || ! kill -0 "$driver" 2> /dev/null; do sleep 0.1; done
  if [ -n "$stop" ]; then tell; fi
  over "$driver"
  code=$?
else
  code=1
fi
finish
case $stop:$code in
  *:0) ;;
  again:* | :1) again ;; # a run that failed; a wrong configuration (2) is not tried again
  end:*) if preempted; then again; fi ;;
esac
exit "$code"
