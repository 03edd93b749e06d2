"""Plan configurations of train_configs/ on the GPUs that their heads name, and write the result into the heads.

A head has a line "# Planned on 4 x h100: ...". The page train_configs/recipes/README.md lists these lines of all recipes. A plan
takes about 15 seconds on an idle machine.

exit codes: 0: done, or all heads are current; 1: with --check, a head differs from its plan; 2: an argument or a file is wrong

    python scripts/dev/plan_recipes.py train_configs/recipes/qwen3_8b_lora_4gpus.toml
    python scripts/dev/plan_recipes.py --missing
    python scripts/dev/plan_recipes.py --check
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config import ConfigError
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.base.config.load import load_config
from trainer.base.system.files import atomic_write
from trainer.base.system.units import GIB
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES, short_name
from trainer.tools.planner.estimate import Hardware, RunEstimate, estimate
from trainer.tools.planner.limits import GPU_RESERVE_BYTES
from trainer.tools.planner.report import time_text, unknown_length

CONFIGS = ROOT / "train_configs"
PAGE = CONFIGS / "recipes" / "README.md"
NOT_PLANNED = "not planned yet"
"""Figures of a head whose file has not been planned."""
_LINE = re.compile(r"^# Planned on (\d+) x (\S+):(.*)$", re.MULTILINE)
_PAGE_HEAD = """# Recipes

Short files for common jobs: every setting that they leave out has its default (`docs/configuration.md`). Each expects the weights
in the folder that it names (`docs/models.md` has the command to download them), and chats or pairs in `data.path`:

    ./run_llama_train.sh --config train_configs/recipes/qwen2_5_7b_lora_1gpu.toml --data.path chats.jsonl

Memory is the planned peak of a GPU beside what the GPU has; the planned recipes leave the planner's margin (`docs/planning.md`).
Durations are lower bounds for the file's steps. `python scripts/dev/plan_recipes.py` writes the figures into the files and this
page. The files in `train_configs/` itself have them in their heads too.

| recipe | GPUs | memory | tokens/s | duration |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Head:
    """The line about the plan in the head of a configuration."""

    ranks: int
    device: str
    """Short name of the accelerator."""
    figures: str

    @classmethod
    def of(cls, path: Path) -> "Head | None":
        """Return the line of a file, or None if the file has none. Raises ConfigError if the device is unknown."""
        found = _LINE.search(path.read_text())
        return (
            cls(int(found[1]), short_name(f"{path}: device", found[2]), found[3].strip() or NOT_PLANNED)
            if found
            else None
        )

    @property
    def is_complete(self) -> bool:
        return self.figures != NOT_PLANNED

    def __str__(self) -> str:
        return f"# Planned on {self.ranks} x {self.device}: {self.figures}"

    def row(self, name: str) -> str:
        memory, rate, duration = self.figures.split(", ", 2) if self.is_complete else (self.figures, "", "")
        cells = (
            f"[`{name}`]({name}.toml)",
            f"{self.ranks} x {self.device}",
            memory,
            rate.removesuffix(" tokens/s"),
            duration,
        )
        return f"| {' | '.join(cells)} |"


def planned(path: Path) -> RunEstimate:
    """Return the estimate of a configuration on the devices that its head names."""
    head = Head.of(path)
    config = load_config(["--config", str(path)], check_files=())
    hardware = Hardware(head.ranks, ACCELERATORS[SHORT_NAMES[head.device]], reserved_bytes=GPU_RESERVE_BYTES)
    return estimate(config, hardware)


def figures(result: RunEstimate) -> str:
    """Return the figures of a head: memory, tokens per second and duration of the steps."""
    memory = f"{result.largest.peak / GIB:.1f} of {result.hardware.accelerator.memory_gib:.1f} GiB"
    verdict = " (does not fit)" if not result.fits else " (tight)" if result.is_tight else ""
    if result.run_s is None:
        duration = unknown_length(result)
    else:
        duration = f"{result.config.training.steps:,} steps in {time_text(result.run_s)}"
    return f"{memory}{verdict}, {result.tokens_per_second:,.0f} tokens/s, {duration}"


def configurations() -> list[Path]:
    """Return the configurations with a plan in their heads."""
    return [path for path in sorted(CONFIGS.rglob("*.toml")) if Head.of(path)]


def page() -> str:
    """Return the page of the recipes, from the heads of the files."""
    return _PAGE_HEAD + "".join(f"{Head.of(path).row(path.stem)}\n" for path in sorted(PAGE.parent.glob("*.toml")))


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="configurations (default: all with such a line)"
    )
    parser.add_argument("--missing", action="store_true", help="plan only files whose heads have no figures yet")
    parser.add_argument("--check", action="store_true", help="compare the heads with their plans, and change nothing")
    args = parser.parse_args()
    differ = False
    for path in args.files or configurations():
        if (head := Head.of(path)) is None:
            raise ConfigError("", f"{path}: has no line '# Planned on N x DEVICE:'")
        if args.missing and head.is_complete:
            continue
        new = Head(head.ranks, head.device, figures(planned(path)))
        differ = differ or new != head
        note = f" (the head says: {head.figures})" if new != head else ""
        print(f"{path.stem}: {new.figures}{note}", flush=True)
        if new != head and not args.check:
            atomic_write(path, _LINE.sub(str(new), path.read_text()))
    if not args.check:
        atomic_write(PAGE, page())
    sys.exit(1 if args.check and differ else 0)


if __name__ == "__main__":
    run_to_end(main)
