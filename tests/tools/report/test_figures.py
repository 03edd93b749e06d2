"""Figures, and the points of their lines."""

import math

import numpy as np
import pytest

from tests.tools.report.run_folders import train_record
from trainer.tools.report.figures import Figure, Figures, figures_of, number
from trainer.tools.report.plan import Plan
from trainer.tools.report.records import Records
from trainer.tools.report.run import Run
from trainer.tools.report.thinning import PAGE_POINTS, group_means, points_per_curve, thinned


def run_of(tmp_path, *records, label="a") -> Run:
    run = Run(tmp_path, label, Records())
    for record in records:
        run.records.add(record)
    return run


def titled(figures: Figures, title: str) -> Figure:
    return next(figure for figure in figures.all() if figure.title == title)


def test_each_metric_has_a_figure_with_a_line_for_each_run_that_has_it(tmp_path):
    evaluation = {"kind": "eval", "dataset": "held_out", "step": 2, "loss": 2.5}
    a = run_of(tmp_path, train_record(1, 3.0), train_record(2, 2.0), evaluation)
    b = run_of(tmp_path, train_record(1, 4.0), train_record(3, 1.0), label="b")
    figures = figures_of([a, b], [None, None])
    loss, held_out = titled(figures, "Training loss"), titled(figures, "Loss on held_out")
    assert [(line.label, line.color) for line in loss.lines] == [("a", 0), ("b", 1)]
    assert [line.label for line in held_out.lines] == ["a"]
    assert loss.rows() == [("1", ["3", "4"]), ("2", ["2", ""]), ("3", ["", "1"])]
    assert loss.lines[0].summary() == ["2", "3", "2", "2 (step 2)", "3 (step 1)", "0"]
    assert (loss.unit, loss.group) == ("nats", "Losses")


def task_record(step, task="arc", **metrics):
    return {"kind": "task", "task": task, "step": step, **metrics, "chance": 0.25, "num_questions": 9}


def test_a_task_has_one_figure_with_the_level_of_chance(tmp_path):
    records = [train_record(1, 3.0), task_record(1, acc=0.2, acc_norm=0.3), task_record(2, acc=0.4, acc_norm=0.2)]
    records += [task_record(step, task="lam", bits_per_byte=2.0 / step) for step in (1, 2)]
    figures = figures_of(
        [run_of(tmp_path, *records), run_of(tmp_path, task_record(1, acc=0.1), label="b")], [None, None]
    )
    assert [figure.title for figure in figures.by_group["Tasks"]] == [
        "Accuracy on arc",
        "Bits per byte of right answers on lam",
    ]
    arc, lam = figures.by_group["Tasks"]
    assert [(line.label, line.level, line.level_name) for line in arc.lines] == [
        ("a", 0.25, "chance"),
        ("b", 0.25, "chance"),
    ]
    assert lam.lines[0].level is None
    assert titled(figures, "Accuracy on arc, by log-probability per character").group == "Other values"
    assert ("Questions of arc", "9 questions") in figures.constants
    assert not any("hance" in title for title, _ in figures.constants)


def test_a_value_that_never_changes_is_a_line_of_text(tmp_path):
    run = run_of(tmp_path, *(train_record(step, num_targets=64) for step in (1, 2)))
    figures = figures_of([run], [None])
    assert ("Targets of a step", "64 tokens") in figures.constants
    assert not any(figure.title == "Targets of a step" for figure in figures.all())


def test_a_metric_that_this_version_does_not_know_has_a_figure(tmp_path):
    run = run_of(tmp_path, *(train_record(step, router_load_s=step) for step in (1, 2)))
    figure = titled(figures_of([run], [None]), "Router load")
    assert (figure.group, figure.unit) == ("Other values", "s")


@pytest.mark.parametrize(
    ("name", "title", "unit"),
    [
        ("train/checkpoint_time_s", "Time of saves since the last record", "s"),
        ("train/reward_chosen", "Reward of chosen answers", ""),
        ("eval/held_out/unigram_entropy", "Unigram entropy of held_out", "nats"),
        ("eval/a/b/num_targets", "Targets in a/b", "tokens"),
        ("eval/held_out/router_load_percent", "Router load on held_out", "%"),
        ("train/idle_gib", "Idle", "GiB"),
    ],
)
def test_a_title_is_words_with_a_unit(tmp_path, name, title, unit):
    kind, _, key = name.partition("/")
    dataset, _, key = key.rpartition("/")
    found = [{"kind": kind, "dataset": dataset, "step": step, key: float(step)} for step in (1, 2)]
    figures = figures_of([run_of(tmp_path, *found)], [None])
    assert [(figure.title, figure.unit) for figure in figures.all()] == [(title, unit)]


def test_phases_are_parts_of_the_step_and_have_means(tmp_path):
    figures = figures_of([run_of(tmp_path, train_record(1), train_record(2, metrics_time_s=0.5))], [None])
    stack = figures.phases[0]
    assert stack.is_stack and [line.label for line in stack.lines] == ["data", "forward", "backward", "metrics"]
    assert list(stack.lines[3].values) == [0.0, 0.5]  # the first record does not name this phase
    assert figures.phase_table == [
        ("data", ["0.25 s (11.1 %)"]), ("forward", ["1 s (44.4 %)"]), ("backward", ["0.75 s (33.3 %)"]),
        ("metrics", ["0.25 s (11.1 %)"]),
    ]  # fmt: skip


@pytest.mark.parametrize(("is_gpu", "planned"), [(True, 1.5), (False, None)])
def test_planned_memory_is_drawn_only_beside_the_allocators_memory(tmp_path, is_gpu, planned):
    run = run_of(tmp_path, *(train_record(step, memory_peak_gib=1.0 + step) for step in (1, 2)))
    figures = figures_of([run], [Plan(1.5, {"parameters": 1.5}, "backward", is_gpu)])
    assert titled(figures, "Peak memory of a rank").lines[0].level == planned


def test_a_run_without_records_has_no_figures(tmp_path):
    figures = figures_of([run_of(tmp_path)], [None])
    assert list(figures.all()) == [] and figures.phase_table == []


def test_only_values_that_are_not_finite_make_an_empty_line(tmp_path):
    figures = figures_of([run_of(tmp_path, train_record(1, None), train_record(2, None))], [None])
    line = titled(figures, "Training loss").lines[0]
    assert line.summary() == ["2", "", "", "", "", "2"] and line.last() == "none"


def test_a_line_with_fewer_points_than_records_has_means_of_all_records(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.tools.report.thinning.PAGE_POINTS", 1)  # 100 points for each curve
    run = run_of(tmp_path, *(train_record(step, float(step % 4 == 0)) for step in range(1, 401)))
    line = titled(figures_of([run], [None]), "Training loss").lines[0]
    assert set(line.values) == {0.0, 1.0} and len(line.indices) <= 100
    assert set(line.means.values) == {0.25} and line.means.steps[-1] == 400
    few = run_of(tmp_path, *(train_record(step, float(step)) for step in range(1, 101)))
    assert titled(figures_of([few], [None]), "Training loss").lines[0].means is None


def test_thinning_keeps_extremes_gaps_and_ends():
    values = np.sin(np.arange(100_000.0))
    values[[4_321, 77_777]], values[50_000] = (55.0, -55.0), math.nan
    kept = thinned(values, 999)
    assert len(kept) <= 999 + 2 and {0, 4_321, 50_000, 77_777, 99_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    group = slice(0, -(-100_000 // 333))  # the first of 333 groups
    assert {values[group].argmin(), values[group].argmax()} <= set(kept.tolist())


@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_values_are_all_kept(count):
    assert thinned(np.zeros(count), 7).tolist() == list(range(count))


def test_all_curves_of_a_page_share_its_points():
    assert points_per_curve(1) == PAGE_POINTS and points_per_curve(160) * 160 <= PAGE_POINTS


def test_means_of_groups_ignore_gaps():
    last, means = group_means(np.array([[1.0], [3.0], [math.nan], [5.0], [math.nan], [math.nan]]), 3)
    assert last.tolist() == [1, 3, 5]
    assert means[:2, 0].tolist() == [2.0, 5.0] and math.isnan(means[2, 0])


@pytest.mark.parametrize(
    ("value", "text"), [(3.0, "3"), (1234567.0, "1,234,567"), (0.1234567, "0.123457"), (math.nan, "not finite")]
)
def test_numbers_of_tables(value, text):
    assert number(value) == text
