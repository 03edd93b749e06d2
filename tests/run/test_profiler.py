"""[profiling]: traces of chosen steps and ranks."""

import gzip
import json
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.training_runs import records, train
from trainer.base.config import ConfigError, ProfilingConfig
from trainer.base.config.load import load_config
from trainer.base.system import console
from trainer.run.profiler import Profiler
from trainer.run.resolve import resolve


@pytest.fixture(scope="module")
def trace(ranks, tiny, tmp_path_factory):
    """The only trace of a run on two ranks."""
    folder = tmp_path_factory.mktemp("profiled")
    settings = ["--profiling.first_step", "2", "--profiling.num_steps", "2", "--profiling.rank", "1"]
    ranks(2).run(train, [*tiny, *settings, "--run.output_folder", str(folder), "--run.name", "run"])
    (path,) = (folder / "run" / "profiles").iterdir()
    return path


def test_a_trace_has_the_phases_of_the_chosen_steps_of_the_chosen_rank(trace):
    assert trace.name == "step-00000002-rank-00001.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    phases = Counter(event["name"] for event in events if event.get("name", "").startswith("phase: "))
    # Two steps of two microbatches.
    assert {name: phases[f"phase: {name}"] for name in ("data", "forward", "backward", "clip", "optimizer")} == {
        **{"data": 2, "forward": 4, "backward": 4, "clip": 2, "optimizer": 2}
    }


@pytest.mark.parametrize(("layout", "passes"), [("dp_shard", ("forward", "backward")), ("pp", ("pipeline",))])
def test_the_phases_of_a_step_add_up_to_its_duration(ranks, tiny, tmp_path, layout, passes):
    settings = [f"--parallel.{layout}", "2", "--run.output_folder", str(tmp_path), "--run.name", "run"]
    ranks(2).run(train, [*tiny, *settings])
    for record in records(tmp_path / "run")[1:]:  # the first window begins before the first phase
        phases = ("data", *passes, "reduction", "clip", "optimizer", "metrics", "other")
        assert all(record[f"{name}_time_s"] > 0 for name in passes)
        assert sum(record[f"{name}_time_s"] for name in phases) == pytest.approx(record["step_time_s"], rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--profiling.first_step", "301"], r"profiling.first_step: exceeds \[training\] steps = 300"),
        (
            ["--profiling.first_step", "1", "--profiling.rank", "2"],
            r"profiling.rank: must be below the number of ranks, 2",
        ),
    ],
)
def test_a_trace_that_would_never_be_written_is_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(load_config(settings), 2)


def warnings_after(step):
    with mock.patch.object(console, "warning") as warning:
        Profiler(ProfilingConfig(first_step=1, num_steps=2), torch.device("cpu"), Path("run"), step)
    return [call.args[0] for call in warning.call_args_list]


def test_a_resumed_run_warns_if_the_steps_are_already_completed(ranks):
    message = "the run has already completed the steps of [profiling], up to 2: no trace"
    assert [ranks(1).run(warnings_after, step) for step in (0, 1, 2)] == [[[]], [[]], [[message]]]
