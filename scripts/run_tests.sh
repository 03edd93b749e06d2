#!/usr/bin/env bash
# Run the checks and the tests: scripts/run_tests.sh [--quick] [pytest arguments]
# --quick leaves out complete runs, commands and whatever starts ranks: for use between commits.
#
# Tests see an environment with these variables only, so that a result does not depend on the shell:
#   HOME, PATH, TMPDIR, CI                  as they are
#   LD_LIBRARY_PATH, OPENBLAS_*             what the libraries of this machine need
#   OMP_NUM_THREADS, OMP_WAIT_POLICY        see below
#   TRANSFORMERS_4_PYTHON                   a Python with transformers 4.51, for the tests of old readers
#   PYTHON                                  the interpreter to try first; the one that was found runs the tests
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/environment.sh"
use_environment "pytest hypothesis flask flask_cors gguf lm_eval moto nanio obstore accelerate ruff xdist transformers peft trl pyarrow tokenizers zstandard matplotlib wandb mlflow sqlalchemy alembic trackio bokeh playwright bitsandbytes torchao" dev

cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
kept=()
for name in HOME PATH TMPDIR CI LD_LIBRARY_PATH "${!OPENBLAS_@}" TRANSFORMERS_4_PYTHON; do
    if [ -n "${!name+set}" ]; then kept+=("$name=${!name}"); fi
done
# One OpenMP thread per process that sleeps while it waits: tests start more processes than there are cores.
kept+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" "OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}")
# Three workers on two cores: tests spend much of their time waiting for ranks and runs.
exec env -i "${kept[@]}" "$PYTHON" -m pytest -n 3 --dist worksteal "$@"
