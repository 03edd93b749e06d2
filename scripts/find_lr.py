"""Find a learning rate: train with a rate that rises exponentially, and look where the loss falls and where it rises.

    python scripts/find_lr.py --config my.toml                                       # from lr / 1000 to lr * 100
    python scripts/find_lr.py --config my.toml --min-lr 1e-6 --max-lr 1 --steps 200
    NGPU=4 python scripts/find_lr.py --config my.toml --parallel.tp 2

The test is a run of its own, with lr_schedule.name = "range_test", in the run folder NAME-find-lr. After Ctrl-C or a failure,
the same command continues it. The script ends the run when the loss is not finite or has risen far above its start, and
writes find_lr.json (rates, losses, suggestion) and find_lr.png to its folder. docs/running.md describes what the suggestion
is worth.
"""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.base.system.run_files import CHECKPOINTS, METRICS_FILE
from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config import (
    Config,
    ConfigError,
    EvaluationConfig,
    LrScheduleConfig,
    MetricsConfig,
    OptimizerConfig,
    ProfilingConfig,
    SamplesConfig,
)
from trainer.base.config.argument_types import number, positive_float
from trainer.base.config.arguments import Arguments
from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.environment_variables import environment_int
from trainer.base.config.exits import run_to_end
from trainer.base.config.render import require_same_settings, to_toml
from trainer.base.system.files import atomic_write, folder_error, read_json_lines, read_json_object
from trainer.base.system.process import die_with_parent
from trainer.base.system.spelling import counted
from trainer.tools.report.picture import Picture

RESULT, PICTURE = "find_lr.json", "find_lr.png"
LEAST_STEPS = 8
"""Number of finite losses that a suggestion needs."""
_POLL_S = 0.5
_NOT_COMPARED = ("parallel.", "activation_checkpoint.", "compile.", "distributed.", "metrics.", "resilience.")
"""Sections that may change when a range test continues, because they do not change its losses."""
_LIMITS = (
    "The test trains each rate for one step, on other samples than the rate before it. It holds for this model, these initial "
    "weights, this data, optimizer and batch size. The best rate of a long run is often lower than that of a short test: "
    "compare runs with a third of the suggestion, and with three times of it."
)


# ---------------------------------------------------------------- the suggestion


@dataclass(frozen=True)
class Curve:
    """Losses of a range test, up to the first one that is not finite."""

    rates: list[float]
    losses: list[float]

    @property
    def window(self) -> int:
        """Number of steps on each side of a step over which its loss is averaged."""
        return max(1, len(self.losses) // 25)

    @property
    def smoothed(self) -> list[float]:
        """Mean of the losses around each step. Near the ends, the window is smaller, so that it stays symmetric."""
        means = []
        for i in range(len(self.losses)):
            half = min(self.window, i, len(self.losses) - 1 - i)
            around = self.losses[i - half : i + half + 1]
            means.append(sum(around) / len(around))
        return means

    @property
    def start(self) -> float:
        """Mean of the first losses."""
        first = self.losses[: 2 * self.window + 1]
        return sum(first) / len(first)

    @property
    def lowest(self) -> int:
        """Index of the lowest smoothed loss, of those with a complete window."""
        smoothed = self.smoothed
        return min(range(self.window, len(smoothed) - self.window), key=smoothed.__getitem__)

    @property
    def noise(self) -> float:
        """Standard deviation of the losses, from the differences of neighbours up to the lowest one."""
        before = self.losses[: max(8, self.lowest + 1)]
        squares = [(b - a) ** 2 / 2 for a, b in itertools.pairwise(before)]
        return math.sqrt(sum(squares) / len(squares))

    def has_diverged(self) -> bool:
        """Return whether the loss has risen as far above its start as it had fallen below it, and by a tenth."""
        if len(self.losses) < LEAST_STEPS:
            return False
        fall = self.start - self.smoothed[self.lowest]
        return min(self.losses[-3:]) > self.start + max(fall, 0.1 * abs(self.start))


@dataclass(frozen=True)
class Suggestion:
    rate: float | None
    """None: the test shows no rate."""
    reason: str


def suggest(curve: Curve, stopped_by: str) -> Suggestion:
    """Return a learning rate, and why. stopped_by: why the curve ends before the largest rate, or ""."""
    if len(curve.losses) < LEAST_STEPS:
        return Suggestion(
            None, f"only {counted(len(curve.losses), 'step')} with a finite loss; set a lower --min-lr, or more --steps"
        )
    smoothed, lowest = curve.smoothed, curve.lowest
    fall = curve.start - smoothed[lowest]
    if fall < 4 * curve.noise / math.sqrt(2 * curve.window + 1):
        text = f"the loss falls by {max(0.0, fall):.3g} only, which its noise of {curve.noise:.3g} from step to step explains"
        return Suggestion(None, f"{text}; set more --steps, a larger batch, or another range of rates")
    slopes = [b - a for a, b in itertools.pairwise(smoothed[: lowest + 1])]
    steepest = slopes.index(min(slopes))
    falls = f"the loss falls fastest at {curve.rates[steepest]:.2g}"
    if lowest >= len(smoothed) - 1 - 2 * curve.window and not stopped_by:
        text = f"{falls} and still falls at the largest rate, {curve.rates[-1]:.2g}; set a larger --max-lr"
        return Suggestion(None, text)
    rate = curve.rates[lowest] / 10
    return Suggestion(
        rate, f"a tenth of {curve.rates[lowest]:.2g}, where the loss is lowest ({smoothed[lowest]:.4g}); {falls}"
    )


# ---------------------------------------------------------------- the run


def with_lr(optimizer: OptimizerConfig, lr: float) -> OptimizerConfig:
    """Return the settings with another rate. That of Muon's matrices, if it is a rate of its own, keeps its ratio."""
    muon_lr = None if optimizer.muon_lr is None else optimizer.muon_lr * lr / optimizer.lr
    return replace(optimizer, lr=lr, muon_lr=muon_lr)


def settings_of_test(config: Config, min_lr: float, max_lr: float, steps: int) -> Config:
    """Return the settings of the range test. What does not change the losses, such as evaluations, is switched off."""
    checkpoint = replace(
        config.checkpoint,
        interval_steps=max(1, steps // 5),
        keep=1,
        keep_interval_steps=0,
        load_step=0,
        export_huggingface=False,
        export_gguf="none",
        export_averaged=False,
        export_checkpoint="auto",
    )
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-find-lr"),
        training=replace(config.training, steps=steps, epochs=None, batch_schedule={}),
        optimizer=with_lr(config.optimizer, max_lr),
        lr_schedule=LrScheduleConfig(name="range_test", min_lr_ratio=min_lr / max_lr),
        checkpoint=checkpoint,
        evaluation=EvaluationConfig(),
        samples=SamplesConfig(),
        metrics=MetricsConfig(interval_steps=1, sinks=("console", "jsonl")),
        profiling=ProfilingConfig(),
        resilience=replace(config.resilience, on_loss_spike="off", on_max_skips="stop"),
    )


def read_curve(folder: Path) -> tuple[Curve, bool]:
    """Return the curve that a run has recorded, and whether a loss that is not finite ends it."""
    rates, losses = [], []
    path = folder / METRICS_FILE
    for record in read_json_lines(path) if path.exists() else ():
        if record["kind"] == "train":
            if record["loss"] is None or not math.isfinite(record["loss"]):
                return Curve(rates, losses), True
            rates.append(record["learning_rate"])
            losses.append(record["loss"])
    return Curve(rates, losses), False


def reason_to_stop(curve: Curve, is_non_finite: bool) -> str:
    """Return why a run that has recorded this should not continue, or "". Args: see `read_curve`."""
    if is_non_finite:
        return "the loss is not finite"
    return "the loss has risen far above its start" if curve.has_diverged() else ""


def train(test: Config) -> str:
    """Train in a process of its own, or continue, until the last step or until a reason to stop. Return why the curve ends
    before the last step, or "". If the run fails, exit with its code."""
    with tempfile.TemporaryDirectory() as settings:
        path = Path(settings) / f"{test.run.name}.toml"
        path.write_text(to_toml(test, keep_credentials=True))
        return _train(path, test.run.folder, test.training.steps)


def _train(settings: Path, folder: Path, steps: int) -> str:
    """Like `train`. settings: TOML file of the run."""
    command = [str(ROOT / "run_llama_train.sh"), "--config", str(settings)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHON": sys.executable}, preexec_fn=die_with_parent)
    stopped = ""
    try:
        while process.poll() is None:
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if not stopped and (stopped := reason_to_stop(*read_curve(folder))):
                    process.terminate()  # the run ends after its step
    except KeyboardInterrupt:
        process.terminate()  # the terminal has sent Ctrl-C to the run too; both are one request
        process.wait()
        raise
    curve, is_non_finite = read_curve(folder)
    if is_non_finite:
        return "the loss is not finite"
    if not stopped and (process.returncode or len(curve.losses) < steps):
        sys.exit(process.returncode or 1)  # the run has printed the reason
    return stopped


def draw(path: Path, curve: Curve, suggestion: Suggestion, name: str) -> None:
    """Draw losses over rates. If matplotlib is missing or the file cannot be written, print one line instead."""
    try:
        picture = Picture.open(path, size=(8, 5))
        _draw(picture.figure.add_subplot(), curve, suggestion, name)
        picture.save(dpi=150)
        print(f"wrote {path}")
    except ConfigError as error:
        print(f"no picture: {error.message}")


def _draw(axes: Any, curve: Curve, suggestion: Suggestion, name: str) -> None:
    axes.plot(curve.rates, curve.losses, ".", color="#888888", markersize=4, label="loss of a step")
    axes.plot(curve.rates, curve.smoothed, color="#004488", label=f"mean of {2 * curve.window + 1} steps")
    if suggestion.rate is not None:
        axes.axvline(suggestion.rate, color="#bb5566", linestyle="--", label=f"suggestion: {suggestion.rate:.2g}")
    lowest, highest = min(curve.losses), min(max(curve.losses), 2 * curve.start - min(curve.losses))
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", title=f"learning-rate range test of {name}")
    margin = 0.05 * (highest - lowest) or 1.0
    axes.set_ylim(lowest - margin, highest + margin)
    axes.legend(frameon=False)


def report(folder: Path, name: str, stopped_by: str) -> None:
    curve, _ = read_curve(folder)
    suggestion = suggest(curve, stopped_by)
    record: dict[str, Any] = {
        "stopped_by": stopped_by,
        "noise": curve.noise if len(curve.losses) >= LEAST_STEPS else None,
    }
    record |= {"suggestion": asdict(suggestion)} | asdict(curve) | {"smoothed": curve.smoothed}
    atomic_write(folder / RESULT, json.dumps(record, indent=1))
    print(
        f"wrote {folder / RESULT}: {counted(len(curve.losses), 'step')}"
        + (f", because {stopped_by}" if stopped_by else "")
    )
    if curve.losses:
        draw(folder / PICTURE, curve, suggestion, name)
    print_suggestion(suggestion)


def print_suggestion(suggestion: Suggestion) -> None:
    if suggestion.rate is None:
        print(f"no suggestion: {suggestion.reason}")
    else:
        print(f"suggestion: --optimizer.lr {suggestion.rate:.2g}, {suggestion.reason}")
    print(_LIMITS)


def main() -> None:
    parser = Arguments(__doc__, settings=True)
    parser.add_argument("--min-lr", type=positive_float, metavar="X", help="first rate (default: optimizer.lr / 1000)")
    parser.add_argument("--max-lr", type=positive_float, metavar="X", help="last rate (default: optimizer.lr * 100)")
    parser.add_argument("--steps", type=number(int, 20, 10**6), default=100, metavar="N", help="number of steps")
    args, settings = parser.parse_known_args()
    if environment_int("NNODES", 1, 1) > 1:
        raise ConfigError("", "NNODES: a range test runs on one node")
    config = config_from_command_line(settings)
    min_lr, max_lr = args.min_lr or config.optimizer.lr / 1000, args.max_lr or config.optimizer.lr * 100
    if min_lr >= max_lr:
        raise ConfigError("", f"--min-lr {min_lr:g}: must be below --max-lr {max_lr:g}")
    test = settings_of_test(config, min_lr, max_lr, args.steps)
    folder = test.run.folder
    if os.path.exists(folder) and (problem := folder_error(folder)):
        raise ConfigError("", f"{folder} {problem}")
    if read_curve(folder)[0].losses:
        require_same_settings(test, "a range test", _NOT_COMPARED)
    if (folder / RESULT).exists():
        print(f"{folder / RESULT}: this range test is complete; to repeat it, remove {folder}")
        saved = read_json_object(folder / RESULT)["suggestion"]
        print_suggestion(Suggestion(saved["rate"], saved["reason"]))
        return
    report(folder, config.run.name, train(test))
    shutil.rmtree(folder / CHECKPOINTS)  # nobody continues a complete range test


if __name__ == "__main__":
    run_to_end(main, "interrupted; rerun the same command to continue")
