"""scripts/dev/gpu_acceptance.py: rows that accumulate over several calls."""

import pytest

from scripts.dev import gpu_acceptance
from scripts.dev.gpu_acceptance import PARTS, SPEED, Failed, Session, markdown, run_part
from trainer.base.config.load import load_config


def part_of(monkeypatch, tasks):
    monkeypatch.setitem(PARTS, "fake", lambda session: iter(tasks.items()))


def fail():
    raise Failed("out of memory")


def test_rows_accumulate_and_failed_rows_are_repeated(tmp_path, monkeypatch):
    session = Session(tmp_path, tiny=True)
    part_of(monkeypatch, {"a": lambda: {"x": 1.0}, "b": fail})
    assert not run_part("fake", session)
    part_of(monkeypatch, {"a": fail, "b": lambda: {"x": 12345.678}, "c": lambda: {"y": "z"}})
    assert run_part("fake", session)
    assert [(r["row"], r.get("error")) for r in session.read_rows("fake")] == [
        *(("a", None), ("b", "out of memory"), ("b", None), ("c", None))
    ]
    assert markdown("fake", session).splitlines() == [
        "| fake | x | y |",
        "|---|---|---|",
        "| a | 1 |  |",
        "| b | 1.235e+04 |  |",
        "| c |  | z |",
    ]


def test_rows_of_another_size_or_commit_are_measured_again(tmp_path, monkeypatch):
    label = {"commit": "one", "tiny": True}
    part_of(monkeypatch, {"a": lambda: {"x": 1.0}})
    assert run_part("fake", Session(tmp_path, True, label))
    part_of(monkeypatch, {"a": fail})
    assert run_part("fake", Session(tmp_path, True, label))
    assert not run_part("fake", Session(tmp_path, True, label | {"tiny": False}))
    assert not run_part("fake", Session(tmp_path, True, label | {"commit": "two"}))


def test_rows_are_chosen_by_a_part_of_their_names(tmp_path, monkeypatch):
    part_of(monkeypatch, {"a, full": fail, "a, none": lambda: {"x": 1.0}, "b, none": fail})
    session = Session(tmp_path, tiny=True, rows=["a, n"])
    assert run_part("fake", session)
    assert [row["row"] for row in session.read_rows("fake")] == ["a, none"]


def test_a_part_stops_when_its_time_is_used_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_acceptance, "PART_SECONDS", -1)
    part_of(monkeypatch, {"a": lambda: {"x": 1.0}})
    assert not run_part("fake", Session(tmp_path, tiny=True))
    assert capsys.readouterr().out == "fake: no time is available for a; call the script again\n"


def test_a_command_ends_with_its_part(tmp_path):
    with pytest.raises(Failed, match="did not end within the remaining 1 s"):
        Session(tmp_path, tiny=True, end=0.0).run("-c", "import time; time.sleep(60)")


def test_a_command_that_fails_is_reported_with_its_last_line(tmp_path):
    with pytest.raises(Failed, match="must be at least 1"):
        Session(tmp_path, tiny=True).run("train.py", "--training.steps", "0")


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_rows_whose_names_differ(part, tmp_path):
    rows = [row for row, _ in PARTS[part](Session(tmp_path, tiny=False))]
    assert rows and len(set(rows)) == len(rows)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_every_row_starts_a_command_and_trains_with_valid_settings(part, tiny, tmp_path, monkeypatch):
    def start(session, *words, **variables):
        if words[0] == "train.py":
            load_config(words[1:])
        raise Failed("started")

    monkeypatch.setattr(Session, "run", start)
    monkeypatch.setattr(gpu_acceptance, "write_tensors", lambda folder, *_: folder.mkdir())  # up to 60 GB
    for _, task in PARTS[part](Session(tmp_path, tiny)):
        with pytest.raises(Failed, match="started"):
            task()


def test_throughput_and_memory_are_those_of_a_real_run(tmp_path, corpus):
    session = Session(tmp_path, tiny=True)
    data = {"data.dataset": "text", "data.path": str(corpus), "data.store_folder": str(tmp_path)}
    row = session.measure(
        "run", session.settings(SPEED["Llama 3 8B, LoRA, full"], **data, **{"training.global_batch_size": "2"})
    )
    assert row["tokens_per_second"] > 0 and row["memory_peak_gib"] > 0
