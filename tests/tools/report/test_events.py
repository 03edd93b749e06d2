"""Events and samples as rows of tables."""

import math

import pytest

from trainer.tools.report.events import clock, evaluated, event_rows, overview_of, samples_of
from trainer.tools.report.plan import Plan
from trainer.tools.report.records import Records
from trainer.tools.report.run import Run


def texts(*events) -> list[str]:
    return [row.text for row in event_rows(events)[0]]


def cell(run: Run, column: str) -> str:
    return next(" ".join(cell.lines) for cell in overview_of(run, None, []) if cell.column == column)


def test_events_are_listed_latest_first_in_words():
    events = [
        {"kind": "eval", "step": 1, "dataset": "held_out", "loss": 2.5, "perplexity": 12.2},
        {
            "kind": "task",
            "step": 2,
            "task": "arc",
            "acc": 0.5,
            "chance": 0.25,
            "num_questions": 1200,
            "tasks_time_s": 3,
        },
        {"kind": "rollback", "step": 5, "samples": 1024},
        {"kind": "skipped", "step": 6, "count": 3},
        {"kind": "not finite", "step": 7, "last_step": 9},
    ]
    rows, left = event_rows(events)
    assert [(row.step, row.name, row.text) for row in rows] == [
        (7, "loss not finite", "in all records up to step 9"),
        (6, "skipped steps", "3 updates skipped since the previous record"),
        (5, "rollback", "training returned to the latest checkpoint; 1,024 samples skipped"),
        (2, "task", "arc: acc 0.5, over 1,200 questions"),
        (1, "evaluation", "held_out: loss 2.5, perplexity 12.2"),
    ]
    assert left == 0


@pytest.mark.parametrize(
    ("pretrained", "huggingface", "shown"),
    [
        ("org/model", "/cache/models--org--model/snapshots/0a1b", "org/model"),
        ("", "weights/model", "weights/model"),
        ("outputs/run", "", "llama3/debug"),
        ("", "", "llama3/debug"),
    ],
)
def test_the_model_has_the_name_that_the_user_has_given(tmp_path, pretrained, huggingface, shown):
    settings = {"pretrained": pretrained, "huggingface": huggingface, "name": "llama3", "size": "debug"}
    run = Run(tmp_path, "run", settings={f"model.{key}": f'"{value}"' for key, value in settings.items()})
    assert cell(run, "Model") == shown
    assert cell(Run(tmp_path, "without a configuration"), "Model") == ""


@pytest.mark.parametrize(
    ("record", "shown"),
    [({"epochs_seen": 1234.567}, "30 of 40 (1,234.57 epochs)"), ({}, "30 of 40"), ({"epochs_seen": "x"}, "30 of 40")],
)
def test_the_progress_is_in_steps_and_epochs(tmp_path, record, shown):
    run = Run(tmp_path, "run", Records(), {"training.steps": "40"})
    run.records.add({"kind": "train", "step": 30} | record)
    assert cell(run, "Step") == shown


def test_saves_do_not_push_rare_events_out_of_the_table():
    rollback = {"kind": "rollback", "step": 1, "samples": 8}
    saves = [{"kind": "checkpoint", "step": step, "blocked_s": 1.0} for step in range(2, 502)]
    rows, left = event_rows([rollback, *saves])
    assert rows[-1].name == "rollback" and len(rows) == 101 and left == 400
    assert [row.step for row in rows[:2]] == [501, 500]


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "checkpoint", "blocked_s": None},
        {"kind": "mixture", "sample": 1, "weights": ["a"]},
        {"kind": "eval", "dataset": "x", "loss": None},
        {"kind": "straggler", "rank": 3},
        {"kind": "of another version", "value": [1]},
    ],
)
def test_an_event_of_another_form_is_shown_as_it_is(event):
    assert texts(event | {"step": 1, "timestamp_s": 1.0}) == [
        ", ".join(f"{key} {value}" for key, value in event.items() if key != "kind" and value is not None)
    ]


def test_samples_are_listed_latest_first_and_odd_ones_are_left_out():
    good = [{"kind": "samples", "step": s, "samples": [{"prompt": "a", "text": f"b{s}"}, 3]} for s in range(1, 33)]
    odd = {"kind": "samples", "step": 40, "samples": "none"}
    found, left = samples_of([*good, odd])
    assert (found[0].step, found[0].texts, len(found), left) == (32, [("a", "b32")], 30, 2)
    assert event_rows([*good, odd]) == ([], 0)


def test_a_long_text_is_cut_and_says_so():
    event = {"kind": "samples", "step": 1, "samples": [{"prompt": "", "text": "x" * 20_010}]}
    assert samples_of([event])[0][0].texts[0][1].endswith("x ... (10 more characters)")


@pytest.mark.parametrize("time_s", [None, "now", math.nan, math.inf, 1e300, [1]])
def test_a_time_that_is_none_is_not_shown(time_s):
    assert clock(time_s) == ""


def test_a_phase_of_a_mixture_is_an_event():
    event = {"kind": "mixture", "step": 4, "sample": 24000, "weights": {"web": 0.75, "code": 0.25}}
    assert texts(event) == ["web=0.75 code=0.25 from sample 24,000"]


def test_values_that_were_not_measured_are_no_cells(tmp_path):
    run = Run(tmp_path, "run", Records())
    run.records.add({"kind": "train", "step": 1, "memory_peak_gib": None, "loss": None})
    assert cell(run, "Peak memory") == "" and cell(run, "Training loss") == "not finite"
    planned = overview_of(run, Plan(1.5, {}, "backward", is_gpu=True), ["eval/a/loss"])
    assert {c.column: c.lines for c in planned}["Peak memory"] == ["1.5 GiB planned"]
    assert {c.column: (list(c.lines), c.sort_key) for c in planned}["Best loss on a"] == ([], "")


def test_the_best_score_of_a_task_is_the_highest_and_the_fewest_bits_per_byte(tmp_path):
    run = Run(tmp_path, "run", Records())
    for step, acc, bits in ((1, 0.2, 1.5), (2, 0.5, 1.0), (3, 0.4, 1.2)):
        run.records.add({"kind": "task", "task": "arc", "step": step, "acc": acc})
        run.records.add({"kind": "task", "task": "lam/x", "step": step, "bits_per_byte": bits})
    names = evaluated([run])
    assert names == ["task/arc/acc", "task/lam/x/bits_per_byte"]
    cells = {cell.column: (*cell.lines, cell.key) for cell in overview_of(run, None, names)}
    assert cells["Best acc on arc"] == ("0.5 at step 2", 0.5)
    assert cells["Best bits_per_byte on lam/x"] == ("1 at step 2", 1.0)
