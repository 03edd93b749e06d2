# Sourced by run_llama_train.sh and scripts/run_tests.sh: find a Python with the dependencies of pyproject.toml, or install them.
#
#   use_environment MODULES [EXTRA]     sets PYTHON; EXTRA is an optional-dependency group of pyproject.toml
#
# Uses the current interpreter if it has the modules, otherwise .venv in this clone, which is created or completed if needed.
# Nothing outside the clone is changed. PYTHON=... sets the interpreter to try first.

# Otherwise Ctrl-C would end only the check of an interpreter, and the next one would be tried or installed.
trap 'echo interrupted >&2; exit 130' INT

has_modules() { # PYTHON MODULES: of the dependencies, and these
    "$1" - "$ROOT" "$2" >/dev/null 2>&1 <<'PYTHON_CODE'
import importlib.metadata, importlib.util, sys
assert sys.version_info >= (3, 10)
sys.path.insert(0, sys.argv[1])
from trainer.base.system.dependencies import MODULES
assert all(importlib.util.find_spec(name) for name in [*MODULES, *sys.argv[2].split()])
major, minor = importlib.metadata.version("torch").split(".")[:2]
assert (2, 11) <= (int(major), int(minor)) < (2, 16)
PYTHON_CODE
}

announce_download() { # PYTHON VENV
    local size="about 3 GB to download and 5 GB on the disk, most of it torch with CUDA"
    if "$2/bin/python" -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; then
        size="less than 0.2 GB, because torch is there"
    elif [ "$(uname -s)" != Linux ]; then
        size="about 0.3 GB to download, most of it torch"
    fi
    echo "$1 lacks dependencies of pyproject.toml: installing them into $2 (once; $size)" >&2
    if [[ "$size" == *CUDA ]] && ! command -v nvidia-smi >/dev/null && [ ! -e /dev/kfd ]; then
        echo "no GPU driver found; torch for CPUs has 0.2 GB to download instead: press Ctrl-C, run" \
            "$1 -m venv $2 && $2/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu," \
            "then repeat the command" >&2
    fi
}

use_environment() {
    local modules="$1"
    local extra="${2:+[$2]}"
    local venv="$ROOT/.venv"
    PYTHON="${PYTHON:-$(command -v python3 || command -v python || true)}"
    if [ -z "$PYTHON" ]; then
        echo "no python3 on the PATH: Python 3.10 or newer is needed" >&2
        exit 2
    fi
    if has_modules "$PYTHON" "$modules"; then
        return
    fi
    if has_modules "$venv/bin/python" "$modules"; then
        PYTHON="$venv/bin/python"
        return
    fi
    if ! "$PYTHON" -c '' >/dev/null 2>&1; then
        echo "$PYTHON cannot be run; set PYTHON=... to another interpreter" >&2
        exit 2
    fi
    if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "$PYTHON is $("$PYTHON" -V 2>&1): Python 3.10 or newer is needed; set PYTHON=... to another interpreter" >&2
        exit 2
    fi
    announce_download "$PYTHON" "$venv"
    if ! { "$PYTHON" -m venv "$venv" && "$venv/bin/python" -m pip install -e "$ROOT$extra"; } >&2; then
        echo "could not create $venv: see the messages above" >&2
        exit 2
    fi
    PYTHON="$venv/bin/python"
}
