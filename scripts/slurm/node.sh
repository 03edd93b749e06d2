#!/bin/bash
# The task of one node in a job of train.sbatch: run the node's launcher.
#
# srun returns the largest exit code of all tasks, and --kill-on-bad-exit ends the others as soon as one fails. A launcher that was
# ended with SIGTERM has the code 143, which would hide the code of the failure. So this script delays the exit after a failure until
# the other nodes have reported theirs, and returns 1 for a launcher that was asked to stop and could not save.
set -uo pipefail

stopped=false interrupted=false
NODE_RANK="$SLURM_NODEID" "$(dirname "$0")/../../run_llama_train.sh" "$@" &
launcher=$!
# Depending on its plugin, Slurm signals only this process or all processes of the step. The launcher counts signals within a
# second as one request. It ignores SIGINT, as each background process of a shell does.
for signal in HUP TERM USR1; do
    trap "stopped=true interrupted=true; kill -s $signal $launcher 2>/dev/null" "$signal"
done
trap 'stopped=true interrupted=true; kill -s TERM $launcher 2>/dev/null' INT
while :; do
    interrupted=false code=0
    wait "$launcher" || code=$?
    $interrupted || break
done

if $stopped && [ "$code" -gt 128 ]; then
    exit 1
elif [ "$code" != 0 ]; then
    sleep 10 &
    wait $! # until a signal arrives
fi
exit "$code"
