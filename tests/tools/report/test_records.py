"""Curves and events of metrics.jsonl."""

import json
import math
import os

import pytest

from tests.tools.report.run_folders import train_record
from trainer.tools.report.records import Records, read_records


def records_of(tmp_path, *lines) -> Records:
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(texts))
    return read_records(tmp_path / "metrics.jsonl")


def curve(records: Records, name: str) -> dict[int, float]:
    return dict(zip(records.curves[name].steps, records.curves[name].values, strict=True))


def kinds(records: Records) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in records.events]


def test_curves_have_the_values_of_the_records(tmp_path):
    evaluation = {"kind": "eval", "dataset": "held_out", "step": 2, "loss": 2.5}
    records = records_of(tmp_path, train_record(1, 3.25), train_record(2, 3.125), evaluation)
    assert curve(records, "train/loss") == {1: 3.25, 2: 3.125}
    assert curve(records, "eval/held_out/loss") == {2: 2.5}
    assert not {"train/step", "train/timestamp_s", "train/first_step"} & records.curves.keys()
    assert (records.damaged, records.incomplete, records.replaced) == ([], False, 0)


def test_steps_that_were_trained_again_replace_the_earlier_ones(tmp_path):
    lost = [train_record(step, 9.0) for step in (1, 2, 3, 4)]
    saves = [{"kind": "checkpoint", "step": step, "blocked_s": 1.0} for step in (2, 4)]
    records = records_of(tmp_path, *lost, *saves, train_record(3, 1.0), train_record(5, 0.5))
    assert curve(records, "train/loss") == {1: 9.0, 2: 9.0, 3: 1.0, 5: 0.5}
    assert kinds(records) == [("checkpoint", 2)]
    assert records.replaced == 3  # two training records and a save
    assert list(records.train_steps) == [1, 2, 3, 5]


def test_a_save_that_is_recorded_later_than_its_step_removes_nothing(tmp_path):
    late = {"kind": "checkpoint", "step": 1, "blocked_s": 1.0}
    records = records_of(tmp_path, train_record(1), train_record(2), late, train_record(3))
    assert list(records.train_steps) == [1, 2, 3] and kinds(records) == [("checkpoint", 1)]


def test_lines_that_are_no_records_are_counted_by_number(tmp_path):
    no_records = ["{\n", "[1]\n", '{"kind": "train"}\n', '{"kind": 1, "step": 2}\n', '{"kind": "eval", "step": true}\n']
    wrong = ['{"kind": "eval", "step": -1}\n', '{"kind": "eval", "step": 1, "dataset": 3}\n', "\x00\n", "\n"]
    records = records_of(tmp_path, train_record(1), *no_records, *wrong, train_record(2), '{"kind": "train", "st')
    assert records.damaged == [2, 3, 4, 5, 6, 7, 8, 9]  # the empty line is none
    assert records.incomplete and list(records.train_steps) == [1, 2]


def test_values_that_are_not_finite_are_gaps_and_one_event_for_each_row(tmp_path):
    losses = [1.0, None, math.nan, math.inf, 2.0, None]
    records = records_of(tmp_path, *(train_record(step, loss) for step, loss in enumerate(losses, 1)))
    values = list(records.curves["train/loss"].values)
    assert [math.isfinite(value) for value in values] == [True, False, False, False, True, False]
    assert [(event["step"], event["last_step"]) for event in records.events] == [(2, 4), (6, 6)]


def test_integers_without_limit_are_gaps(tmp_path):
    records = records_of(tmp_path, train_record(1, extra=10**400), train_record(2, extra=3))
    assert math.isnan(records.curves["train/extra"].values[0]) and records.curves["train/extra"].values[1] == 3


def test_rollbacks_and_skipped_steps_are_events(tmp_path):
    first = train_record(1, skipped_samples=[], skipped_steps=0)
    back = train_record(2, skipped_samples=[[8, 24]], skipped_steps=2)
    # Adjacent ranges are merged: their number does not grow.
    again = train_record(3, skipped_samples=[[8, 32]], skipped_steps=2)
    records = records_of(tmp_path, first, back, again)
    assert kinds(records) == [("rollback", 2), ("skipped", 2), ("rollback", 3)]
    assert [event.get("samples", event.get("count")) for event in records.events] == [16, 2, 8]


@pytest.mark.parametrize("ranges", [3, "no", [1], [[1, None]], None, {"a": 1}])
def test_skipped_samples_of_another_form_are_ignored(tmp_path, ranges):
    assert kinds(records_of(tmp_path, train_record(1, skipped_samples=ranges))) == []


def test_a_named_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="named pipe"):
        read_records(tmp_path / "metrics.jsonl")


def test_tokens_and_hours_of_a_run_begin_at_zero_and_leave_out_what_was_trained_again():
    records = Records()
    for step, first in ((2, 1), (4, 3), (6, 5), (4, 3), (6, 5)):
        records.add(train_record(step, first_step=first, tokens_seen=100 * step, step_time_s=1800.0))
    assert {name: (list(c.steps), list(c.values)) for name, c in records.axes.items()} == {
        "tokens": ([0, 2, 4, 6], [0.0, 200.0, 400.0, 600.0]),
        "hours": ([0, 2, 4, 6], [0.0, 1.0, 2.0, 3.0]),
    }
