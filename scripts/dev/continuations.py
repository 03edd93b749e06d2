"""The benchmark of scores of continuations: this trainer beside lm-evaluation-harness's own model of transformers."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from trainer.base.config import ConfigError, DistributedConfig, TaskConfig
from trainer.base.config.packages import require_package
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.data.tasks import packed_requests
from trainer.data.tasks.encode import Request
from trainer.data.tasks.questions import read_questions
from trainer.inference.generate import TextGenerator
from trainer.runtime import distributed
from trainer.tools.testing.layouts import Table

_LIMIT = 1e-4
"""Largest accepted relative deviation of a log-probability."""

_UNITS = packed_requests._units
Way = Callable[[], list[tuple[float, bool]]]


def print_continuations(
    run: Path, questions: Path, count: int, batch_sizes: list[int], threads: int, repeats: int
) -> None:
    """Print the duration of scoring all continuations of some questions, from texts to log-probabilities, in fp32.

    Args:
        run: Run folder.
        questions: File of a task of kind "choices".
        count: Number of questions.
        batch_sizes: Of transformers.
        threads: Of the CPU.
        repeats: Turns. The ways take turns, and the table shows medians.

    Raises:
        ConfigError: The questions cannot be read, or the ways do not agree.
    """
    transformers_model = require_package("lm_eval.models.huggingface", "").HFLM
    harness = require_package("trainer.inference.harness", "")
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    distributed.init_process_group(DistributedConfig(), device)
    task = TaskConfig(path=str(questions), kind="choices", limit=count)
    pairs = [pair for question in read_questions(task, "QUESTIONS")[0] for pair in question.requests]
    requests = [harness.Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    generator = TextGenerator.load(run, torch.float32, device, 0, "")
    ours = harness.HarnessModel(generator)

    def each_context_again() -> list[tuple[float, bool]]:
        with mock.patch.object(packed_requests, "_units", _units_of_one):
            return ours.loglikelihood(requests)

    ways: dict[str, Way] = {"shared contexts": lambda: ours.loglikelihood(requests)}
    ways["each context again"] = each_context_again
    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(open_weights(generator.folder, alone=True), Path(folder) / "export", torch.float32)
        settings = {"dtype": "float32", "device": "cpu", "max_length": generator.max_seq_len}
        for batch in batch_sizes:
            model = transformers_model(str(Path(folder) / "export"), batch_size=batch, **settings)
            ways[f"transformers, batch of {batch}"] = partial(model.loglikelihood, requests, disable_tqdm=True)
        print(f"{len(requests)} requests of {task.limit} questions")
        _print_times(ways, repeats)
    distributed.shutdown()


def _units_of_one(requests: Sequence[Request], indices: list[int], seq_len: int) -> list[Any]:
    return [unit for i in indices for unit in _UNITS(requests, [i], seq_len)]


def _print_times(ways: dict[str, Way], repeats: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, list[tuple[float, bool]]] = {}
    for _ in range(repeats):
        for name, of_turns in times.items():
            start = time.perf_counter()
            answers[name] = ways[name]()
            of_turns.append(time.perf_counter() - start)
    table = Table(way="<26", seconds=">9", min_to_max=">17", of_first=">9", deviation=">10")
    first, *_ = ways
    for name, of_turns in times.items():
        median = statistics.median(of_turns)
        pairs = zip(answers[name], answers[first], strict=True)
        deviation = max(abs(a - b) / max(1.0, abs(b)) for (a, _), (b, _) in pairs)
        spread, ratio = f"{min(of_turns):.1f} - {max(of_turns):.1f}", median / statistics.median(times[first])
        table.row(name, f"{median:.1f}", spread, f"{ratio:.2f}", f"{deviation:.0e}")
        if deviation > _LIMIT:
            raise ConfigError("", f"{name}: a log-probability deviates by {deviation:.0e} from {first}")
