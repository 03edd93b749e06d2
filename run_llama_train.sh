#!/usr/bin/env bash
# Train: ./run_llama_train.sh --config train_configs/debug.toml [--section.key value ...]
#
# NGPU          processes on this machine (default: its GPUs, or 1 on a CPU)
# NNODES        machines (1), or the fewest and the most as 2:4;  NODE_RANK  number of this one (0)
# MAX_RESTARTS  how often the ranks are started again after a failure (0)
# MASTER_ADDR   first machine;  MASTER_PORT  a free port there (29500; one machine: any free port)
# LOG_RANK      ranks that print, e.g. 0,3 or all (0)
# PYTHON        interpreter to begin with (python3)
set -euo pipefail
ROOT="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"
source "$ROOT/scripts/environment.sh"
use_environment ""

case " $* " in
    *" --help "* | *" -h "* | *" --print-config "*) NGPU=1 NNODES=1 ;; # answered at once, without looking for GPUs
esac
if [ -z "${NGPU:-}" ]; then
    NGPU=0
    if command -v nvidia-smi >/dev/null; then
        NGPU="$(cd "$ROOT" && "$PYTHON" -c 'from trainer.runtime import device; print(device.count())')"
    fi
    if [ "$NGPU" = 0 ]; then NGPU=1; fi
fi
export NGPU

# exec: signals reach the trainer (or the launcher, which passes them on), and its exit code is the script's.
if [ "$NGPU" = 1 ] && [ "${NNODES:-1}" = 1 ]; then
    exec "$PYTHON" "$ROOT/train.py" "$@"
fi
exec "$PYTHON" "$ROOT/trainer/launch.py" "$@"
