"""Compare two runs: settings, environment, and the first step at which their losses differ.

    python scripts/compare_runs.py outputs/debug outputs/debug-2

Exit code: 0 if all common steps have bitwise identical losses, 1 if not, 2 if a run cannot be read.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.run_files import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE
from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config import ConfigError
from trainer.base.config.argument_types import ReadableRecords
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.base.config.render import differing_settings, setting_texts
from trainer.base.system.files import read_json_lines, read_json_object
from trainer.tools.report.run import find_run, require_run


def differences(a: Path, b: Path) -> Iterator[str]:
    """Yield one line for each setting and each part of the environment that differs. Raises ConfigError for unreadable files."""
    files = (a / CONFIG_FILE, b / CONFIG_FILE)
    yield from differing_settings(*(setting_texts(_read(file), file) for file in files))
    first, second = (_flat(_read(run / ENVIRONMENT_FILE, read_json_object)) for run in (a, b))
    for key in sorted(first | second):
        if first.get(key) != second.get(key):
            yield f"{key} {first.get(key)} -> {second.get(key)}"


def losses(run: Path) -> dict[int, Any]:
    """Return step -> logged loss."""
    records = _read(run / METRICS_FILE, lambda path: list(read_json_lines(path)))
    return {r["step"]: r["loss"] for r in records if r.get("kind") == "train" and r.keys() >= {"step", "loss"}}


def compare_losses(a: dict[int, Any], b: dict[int, Any]) -> tuple[str, bool]:
    """Return a line that reports the comparison, and whether the losses are equal at all steps that both runs logged."""
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return "no step was logged by both runs", False
    step = next((step for step in steps if a[step] != b[step]), None)
    if step is None:
        which = f"all {len(steps)} steps" if len(steps) > 1 else "the only step"
        return f"losses are identical at {which} that both runs logged, up to step {steps[-1]}", True
    return f"losses differ first at step {step}: {a[step]} and {b[step]}", False


def _read(path: Path, read: Callable[[Path], Any] = Path.read_text) -> Any:
    try:
        return read(path)
    except ValueError as error:  # a UnicodeDecodeError is a ValueError
        raise ConfigError("", f"{path} cannot be read ({error})") from None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _run_folder(path: Path) -> Path:
    """Raise ConfigError if a path is not the folder of a run."""
    folder, step = find_run(path)
    if step:
        raise ConfigError("", f"{path} is a checkpoint, but whole runs are compared, such as {folder}")
    require_run(folder)
    return folder


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("a", type=ReadableRecords, metavar="RUN_A", help="run folder")
    parser.add_argument("b", type=ReadableRecords, metavar="RUN_B", help="run folder")
    args = parser.parse_args()
    a, b = map(_run_folder, (args.a, args.b))
    lines = list(differences(a, b))
    line, same = compare_losses(losses(a), losses(b))
    print("\n".join([*(lines or ["settings and environment are equal"]), line]))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    run_to_end(main)
