#!/usr/bin/env bash
# Test and measure on this machine's GPU: scripts/dev/gpu_acceptance.sh [--parts NAME ...] [--out FOLDER] [--tiny]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$ROOT/scripts/environment.sh"
use_environment "pytest hypothesis xdist" dev
exec "$PYTHON" "$ROOT/scripts/dev/gpu_acceptance.py" "$@"
