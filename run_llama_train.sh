#!/usr/bin/env bash
# Train: ./run_llama_train.sh --config train_configs/debug.toml [--section.key value ...]
#
# NGPU          processes per node (default: its GPUs, or 1 on a CPU)
# NNODES        nodes, or their minimum and maximum as 2:4 (default: 1);  NODE_RANK  index of this node (default: 0)
# MAX_RESTARTS  restarts of the ranks after a failure (default: 0)
# MASTER_ADDR   host name of the first node;  MASTER_PORT  a free port on it (default: 29500; one node: any free port)
# LOG_RANK      ranks that log, such as 0,3 or all (default: 0)
# PYTHON        Python interpreter to try first (default: python3)
set -euo pipefail
ROOT="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"
source "$ROOT/scripts/environment.sh"
use_environment ""

case " $* " in
    *" --help "* | *" -h "* | *" --print-config "*) NGPU=1 NNODES=1 ;; # need no GPU
esac
if [ -z "${NGPU:-}" ]; then
    NGPU=0
    if command -v nvidia-smi >/dev/null || [ -e /dev/kfd ]; then # NVIDIA's or AMD's driver
        NGPU="$(cd "$ROOT" && "$PYTHON" -c 'from trainer.runtime import device; print(device.gpu_count())')"
    fi
    if [ "$NGPU" = 0 ]; then NGPU=1; fi
fi
export NGPU

# Signals that arrive while Python starts wait until the trainer, or the launcher, is ready to handle them.
start=("$PYTHON")
if env --block-signal=INT true 2>/dev/null; then # GNU coreutils 8.31
    start=(env --block-signal=INT,TERM,HUP,USR1,USR2 "$PYTHON")
fi
# exec: the trainer, or the launcher, receives signals itself and its exit code becomes the script's.
if [ "$NGPU" = 1 ] && [ "${NNODES:-1}" = 1 ]; then
    exec "${start[@]}" "$ROOT/train.py" "$@"
fi
exec "${start[@]}" "$ROOT/trainer/launch.py" "$@"
