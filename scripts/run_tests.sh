#!/usr/bin/env bash
# Run the checks and the tests: scripts/run_tests.sh [pytest arguments]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/environment.sh"
use_environment "pytest hypothesis ruff xdist transformers peft trl pyarrow tokenizers zstandard matplotlib wandb mlflow sqlalchemy alembic trackio bokeh playwright bitsandbytes torchao" dev

cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# One OpenMP thread per process that sleeps while it waits: tests start more processes than there are cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
# Three workers on two cores: tests spend much of their time waiting for ranks and runs.
exec "$PYTHON" -m pytest -n 3 --dist worksteal "$@"
