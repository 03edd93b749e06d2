import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.run.sinks.runs import wait_for_delivery
from trainer.base.config import Config, MetricsConfig, TrainingConfig
from trainer.base.system.units import duration
from trainer.resilience.guard import StepOutcome
from trainer.run.metrics import Metrics
from trainer.run.resolve import resolve
from trainer.run.sinks import build_sinks
from trainer.run.sinks.local import RemainingTime
from trainer.run.sinks.sink import LoggedRun
from trainer.runtime import device as devices
from trainer.runtime.accelerators import ACCELERATORS
from trainer.runtime.step_timer import StepTimer
from trainer.state import TrainState

CPU = torch.device("cpu")


def open_metrics(folder, first_step=0, steps=20, tensorboard=False, tokens_per_step=1, epochs=None, schedule=None):
    names = ("console", "jsonl", *("tensorboard",) * tensorboard)
    config = MetricsConfig(interval_steps=5, sinks=names)
    training = TrainingConfig(steps=steps, global_batch_size=tokens_per_step, batch_schedule=schedule or {}, seq_len=1)
    resolved = replace(resolve(Config(), 2), flops_per_token=10**9)
    sinks = build_sinks(names, LoggedRun("run", folder, training, config, epochs), is_writer=True)
    metrics = Metrics(config, training, resolved, CPU, StepTimer(CPU), sinks, samples_per_epoch=4)
    metrics.rewind(first_step)
    return metrics


def test_the_sections_of_a_name_are_added(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    metrics = open_metrics(tmp_path)
    for duration_s in (2.0, 3.0):
        with metrics.section("checkpoint") as seconds:
            clock[0] += duration_s
        assert seconds() == duration_s
    assert metrics.spent == {"checkpoint": 5.0}


def log_step(metrics, step, loss=3.0):
    outcome = StepOutcome(step, 8, False, 0, 0, loss, 1.5)
    metrics.log_step(TrainState(step=step, cursor=step, tokens_seen=1), outcome, lr=1e-3, objective={"num_targets": 1})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_first_step_every_nth_step_and_the_last_step_are_due(tmp_path):
    assert [s for s in range(1, 21) if open_metrics(tmp_path).due(s)] == [1, 5, 10, 15, 20]
    assert [s for s in range(8, 23) if open_metrics(tmp_path, first_step=7, steps=22).due(s)] == [8, 10, 15, 20, 22]


def test_a_record_ends_where_the_batch_size_changes(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    metrics = open_metrics(tmp_path, tokens_per_step=100, schedule={"7": 300, "12": 50})
    due = [step for step in range(1, 21) if metrics.due(step)]
    assert due == [1, 5, 7, 10, 12, 15, 20]
    for step in due:
        clock[0] += 2.0 * (step - metrics.recorded_step)
        log_step(metrics, step)
    assert [r["global_batch_size"] for r in lines(tmp_path)] == [100, 100, 100, 300, 300, 50, 50]
    assert [r["tokens_per_second"] for r in lines(tmp_path)] == [50, 50, 50, 150, 150, 25, 25]


def test_throughput_excludes_evaluation_and_checkpoints(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(devices, "peak_flops", lambda device, dtype: 50e12)
    metrics = open_metrics(tmp_path, tokens_per_step=50_000)
    clock[0] += 4.0  # two steps
    with metrics.section("data"):
        clock[0] += 1.0
    with metrics.section("checkpoint"):
        clock[0] += 100.0
    with metrics.section("evaluation"):
        clock[0] += 30.0
    with metrics.section("samples"):
        clock[0] += 7.0
    log_step(metrics, 2)
    clock[0] += 2.0  # the next window starts without them
    log_step(metrics, 3)
    first, second = lines(tmp_path)
    assert first["step_time_s"] == 2.5
    assert first["data_time_s"] == 0.5
    assert (first["checkpoint_time_s"], first["evaluation_time_s"], first["samples_time_s"]) == (100.0, 30.0, 7.0)
    assert second["samples_time_s"] == 0.0
    assert first["tokens_per_second"] == 20_000
    assert first["tokens_per_second_per_rank"] == 10_000
    assert first["tflops_per_second_per_rank"] == 10.0
    assert first["mfu_percent"] == 20.0
    assert second["tokens_per_second"] == 25_000


def test_the_phases_of_a_record_add_up_to_the_duration_of_a_step(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    metrics = open_metrics(tmp_path)
    write = metrics.log_event
    monkeypatch.setattr(metrics, "log_event", lambda record: (write(record), clock.__setitem__(0, clock[0] + 4.0)))
    for step in (1, 2):
        with metrics.section("data"):
            clock[0] += 1.0
        metrics.timer.start("forward")
        clock[0] += 2.0
        log_step(metrics, step)
    for record, written in zip(lines(tmp_path), (0.0, 4.0), strict=True):
        phases = {key: record[key] for key in record if key.endswith("_time_s") and key != "step_time_s"}
        assert record["step_time_s"] == sum(phases.values()) == 3.0 + written
        assert record.get("metrics_time_s", 0.0) == written


def test_mfu_of_published_examples():
    """Llama-3 405B: 430 TFLOP/s for each of 8,192 H100 were published as 43 % (arXiv:2407.21783, table 4)."""
    assert 100 * 430e12 / ACCELERATORS["NVIDIA H100 80GB HBM3"].flops["bf16"] == pytest.approx(43, abs=0.6)


def test_mfu_is_omitted_if_the_peak_is_unknown(tmp_path):
    log_step(open_metrics(tmp_path), 1)
    assert "mfu_percent" not in lines(tmp_path)[0]
    assert devices.peak_flops(CPU, "bf16") is None


def test_a_resumed_run_continues_the_file_without_records_of_later_steps(tmp_path):
    metrics = open_metrics(tmp_path)
    for step in (1, 5, 10):
        log_step(metrics, step)
    metrics.log_event({"kind": "eval", "step": 10, "dataset": "held_out", "loss": 2.0})
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    metrics = open_metrics(tmp_path, first_step=5)
    log_step(metrics, 6)
    assert [record["step"] for record in lines(tmp_path)] == [1, 5, 6]
    metrics.rewind(5)
    log_step(metrics, 6)
    assert [record["step"] for record in lines(tmp_path)] == [1, 5, 6]


def test_files_that_could_not_be_opened_are_opened_at_the_next_record(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "tb").touch()
    metrics = open_metrics(tmp_path, tensorboard=True)
    log_step(metrics, 1)
    (tmp_path / "metrics.jsonl").rmdir()
    (tmp_path / "tb").unlink()
    for step in (2, 3):
        log_step(metrics, step)
    metrics.close()
    assert [record["step"] for record in lines(tmp_path)] == [2, 3]
    assert [event.step for event in read_board(tmp_path).Scalars("train/loss")] == [2, 3]


@pytest.mark.parametrize("rotate", [lambda path: path.rename(path.with_suffix(".1")), Path.unlink])
def test_a_file_that_is_moved_or_deleted_during_the_run_is_created_again(tmp_path, rotate):
    metrics = open_metrics(tmp_path, tensorboard=True)
    log_step(metrics, 1)
    wait_for_delivery(metrics.sinks)
    rotate(tmp_path / "metrics.jsonl")
    shutil.rmtree(tmp_path / "tb")
    log_step(metrics, 2)
    wait_for_delivery(metrics.sinks)
    log_step(metrics, 3)
    metrics.close()
    assert [record["step"] for record in lines(tmp_path)] == [2, 3]
    assert [event.step for event in read_board(tmp_path).Scalars("train/loss")] == [2, 3]


def test_a_named_pipe_with_the_name_of_a_file_is_a_warning_during_the_run(tmp_path, capsys):
    metrics = open_metrics(tmp_path)
    log_step(metrics, 1)
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    log_step(metrics, 2)
    log_step(metrics, 3)
    (tmp_path / "metrics.jsonl").unlink()
    log_step(metrics, 4)
    warning = "warning: metrics.jsonl cannot be written (it is a named pipe, not a file); the run continues\n"
    assert capsys.readouterr().err.partition(" ")[2] == warning
    assert [record["step"] for record in lines(tmp_path)] == [4]


def test_records_of_later_steps_are_removed_although_the_disk_is_full(tmp_path):
    metrics = open_metrics(tmp_path)
    for step in (1, 5, 10):
        log_step(metrics, step)
    metrics.close()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        open_metrics(tmp_path, first_step=5).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [record["step"] for record in lines(tmp_path)] == [1, 5]


def test_memory_is_the_resident_memory_of_this_process(tmp_path):
    before = devices.memory_now(CPU)
    ballast = torch.ones(256 * 2**20 // 4)
    metrics = open_metrics(tmp_path)
    log_step(metrics, 1)
    low = lines(tmp_path)[0]
    del ballast
    log_step(metrics, 2)
    freed = lines(tmp_path)[1]
    assert low["memory_end_gib"] * 2**30 == pytest.approx(before + 256 * 2**20, abs=32 * 2**20)
    assert low["memory_peak_gib"] >= low["memory_end_gib"]
    assert freed["memory_end_gib"] < low["memory_end_gib"] - 0.2
    assert freed["memory_peak_gib"] >= low["memory_peak_gib"] - 0.01  # the kernel counts pages in batches


def read_board(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tb")).Reload()


def test_tensorboard_gets_the_same_values(tmp_path):
    metrics = open_metrics(tmp_path, tensorboard=True)
    log_step(metrics, 5, loss=3.25)
    metrics.log_event({"kind": "eval", "step": 5, "dataset": "held_out", "loss": 2.5})
    metrics.close()
    board = read_board(tmp_path)
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(5, 3.25)]
    assert [(e.step, e.value) for e in board.Scalars("eval/held_out/loss")] == [(5, 2.5)]


def test_tensorboard_hides_the_steps_that_are_repeated(tmp_path):
    metrics = open_metrics(tmp_path, tensorboard=True)
    for step in (5, 10, 15):
        log_step(metrics, step, loss=3.0)
    metrics.rewind(5)
    log_step(metrics, 10, loss=2.0)
    metrics.close()
    assert [(e.step, e.value) for e in read_board(tmp_path).Scalars("train/loss")] == [(5, 3.0), (10, 2.0)]


def test_console_line(tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    metrics = open_metrics(tmp_path, steps=200, tokens_per_step=4096)
    clock[0] = 2.0
    log_step(metrics, 1, loss=3.14159)
    line = capsys.readouterr().out
    assert "step   1/200 | loss 3.1416 | grad norm 1.500 | lr 1.00e-03 | 2,048 tokens/s | " in line
    assert line.endswith("| 0 % | 6m38s left\n")
    assert "\x1b" not in line, "colour only on a terminal"


def test_the_console_shows_the_epochs_of_a_run_whose_length_is_given_so(tmp_path, capsys):
    log_step(open_metrics(tmp_path, epochs=1.5), 3)
    assert "step  3/20 | epoch 0.75/1.5 | loss 3.0000 | " in capsys.readouterr().out
    assert lines(tmp_path)[0]["epochs_seen"] == 0.75


def test_the_remaining_time_counts_down_although_one_window_is_slow():
    remaining = RemainingTime(TrainingConfig(steps=1000))
    other = {"evaluation_time_s": 0.0, "tasks_time_s": 0.0, "samples_time_s": 0.0, "checkpoint_time_s": 0.0}
    first = remaining.after({"first_step": 1, "step": 1, "step_time_s": 60.0} | other)
    assert first == 999 * 60  # there is nothing better yet
    times = []
    for step in range(11, 1001, 10):
        seconds = 3.0 if step == 501 else 1.0
        times.append(remaining.after({"first_step": step - 9, "step": step, "step_time_s": seconds} | other))
    assert times[0] == 989.0 and times[-1] == pytest.approx(9.0, rel=0.02)
    assert abs(times[49] - 499) < 0.1 * 499, "one slow window changes the estimate by less than a tenth"
    assert all(a > b for a, b in itertools.pairwise(times[50:]))
    saves = {"evaluation_time_s": 10.0, "tasks_time_s": 0.0, "samples_time_s": 10.0, "checkpoint_time_s": 10.0}
    remaining.forget()
    assert remaining.after({"first_step": 1, "step": 10, "step_time_s": 1.0} | saves) == 990 * 4.0


def test_the_remaining_time_counts_samples():
    remaining = RemainingTime(TrainingConfig(steps=20, global_batch_size=2, batch_schedule={"10": 8}))
    record = {
        "step_time_s": 1.0,
        "evaluation_time_s": 0.0,
        "tasks_time_s": 0.0,
        "samples_time_s": 0.0,
        "checkpoint_time_s": 0.0,
    }
    assert remaining.after({"first_step": 1, "step": 2} | record) == 8 + 10 * 4
    assert remaining.after({"first_step": 3, "step": 10} | record) == 10 * 4
    assert remaining.after({"first_step": 11, "step": 15} | record | {"step_time_s": 4.0}) == pytest.approx(5 * 4)


def test_durations():
    assert [duration(s) for s in (0.4, 59.6, 3599, 3600, 90_061)] == ["0m00s", "1m00s", "59m59s", "1h00m", "25h01m"]


def test_a_full_disk_delays_records_and_does_not_end_the_run(tmp_path, capsys):
    metrics, names = open_metrics(tmp_path, tensorboard=True), [f"{'metric' * 10}{i}" for i in range(20)]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, unlimited[1]))
    try:
        for step in range(20):
            metrics.log_event(
                {"kind": "eval", "step": step, "loss": 1.0, "text": "a" * 1000, **dict.fromkeys(names, 1.0)}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 300, "the last record is incomplete"
    metrics.close()
    warnings = [line.partition("warning: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert warnings == ["metrics.jsonl cannot be written (File too large); the run continues"]
    assert [record["step"] for record in lines(tmp_path)] == list(range(20))
    assert [event.step for event in read_board(tmp_path).Scalars("eval/loss")] == list(range(20))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_log_line_that_cannot_be_printed_does_not_end_the_process():
    code = "from trainer.base.system import console; console.info('a'); console.warning('b'); import os; os._exit(0)"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, cwd=ROOT, check=False)
    assert done.returncode == 0
