"""Dry runs: they say what a run would do, refuse what a run refuses, and write nothing."""

import contextlib
import io
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train as train_py
from tests.conftest import ROOT
from tests.end_to_end.test_commands import SCRIPT, call
from tests.training_runs import combine, error_line, in_folder, train
from trainer.base.config import Config, ConfigError, ModelConfig, TrainingConfig
from trainer.base.config.exits import one_line_errors
from trainer.base.config.load import load_config
from trainer.base.system.files import try_lock
from trainer.base.system.units import format_bytes
from trainer.run import notes
from trainer.run.resolve import resolve
from trainer.run.run_folder import resume_point
from trainer.tools import dry_run, trial
from trainer.tools.planner.estimate import Hardware, estimate, this_machine
from trainer.tools.planner.report import margin_text


def content(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of everything in a folder, and of the folder."""
    stats = {str(path): path.stat() for path in (folder, *folder.rglob("*"))}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in stats.items()}


def dry(argv, patches=(), size=0):
    """Return the printed lines, without the planned memory and time, or the error line of a dry run on this rank. size: number of
    ranks of the run. 0: those of this process group."""
    out = io.StringIO()
    try:
        config = load_config(combine(argv))
    except ConfigError as error:
        return str(error)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.ExitStack() as stack,
            mock.patch.object(dry_run, "_plan", return_value=True),
        ):
            for patch in patches:
                stack.enter_context(mock.patch.object(*patch))
            dry_run.report(config, resolve(config, size or dist.get_world_size()), 1, torch.device("cpu"))
    except ConfigError as error:
        return config.explain(error)
    return out.getvalue()


def point_after_two_evaluations(*words):
    """The checkpoint to resume from, after two evaluations whose loss did not fall."""
    point = resume_point(*words)
    point.state.early_stopping = ["held_out/0/", 1.5, 2]
    return point


def around_a_run(tiny, folder):
    """Dry runs before, between and after the parts of a run; the last two with another seed, and while the folder is in use."""
    argv = [*tiny, *in_folder(folder), "--checkpoint.interval_steps", "2"]
    outputs = [dry(argv)]
    before = content(folder.parent)
    assert not folder.exists()
    train(combine([*argv, "--training.steps", "2"]))
    outputs += [dry(argv), dry([*argv, "--checkpoint.load_step", "2"])]
    train(combine(argv))
    after = content(folder.parent)
    outputs += [dry(argv), dry([*argv, "--run.seed", "5"]), dry([*argv, "--training.epochs", "0.0001"])]
    best = ["--evaluation.interval_steps", "2", "--evaluation.keep_best_on", "held_out"]
    early = [*argv, "--training.steps", "9", *best, "--evaluation.early_stopping_patience", "2"]
    outputs += [dry(early), dry(early, [(dry_run, "resume_point", point_after_two_evaluations)])]
    assert content(folder.parent) == after != before
    return outputs


def test_a_dry_run_says_where_a_run_would_start(ranks, tiny, tmp_path):
    (outputs,) = ranks(1).run(around_a_run, tiny, tmp_path / "run")
    new, resumed, rolled_back, finished, other, epochs, continued, stopped = outputs
    assert f"run folder    {tmp_path}/run: a new run\n" in new and "weights       random\n" in new
    assert "steps         1 to 4, each of 8 samples of 32 tokens, in 4 microbatches on each rank\n" in new
    assert "checkpoints   2 of " in new and new.endswith("dry run complete: nothing was written\n")
    assert f"run folder    {tmp_path}/run: resumes from step 2\n" in resumed and "steps         3 to 4, " in resumed
    assert f"weights       of {tmp_path}/run/checkpoints/step-00000002, which is intact\n" in resumed
    assert " if steps take as long as those of the run so far\n" in resumed and " so far\n" not in new
    assert "resumes from step 2, after newer checkpoints are moved to a folder discarded-N\n" in rolled_back
    assert "already finished at step 4; raise --training.steps to continue\n" in finished and "steps  " not in finished
    assert "already finished at step 4; raise --training.epochs to continue\n" in epochs and "resumes" not in epochs
    assert "early stop    after 2 evaluations in a row in which the loss on held_out no longer falls\n" in continued
    assert "resumes from step 4\n" in continued and "early stop    none\nsamples       none\n" in new
    reason = "already stopped early at step 4: the loss on held_out has not fallen below 1.5000 in 2 evaluations; "
    assert reason in stopped and "resumes" not in stopped and stopped.endswith("nothing was written\n")
    assert other.startswith(f"cannot resume from {tmp_path}/run/checkpoints/step-00000004: run.seed was 0, is 5;")


def notes_of_both(tiny, folder):
    """The lines of a dry run, and the notes that the run logs."""
    argv = [*tiny, *in_folder(folder), "--evaluation.interval_steps", "2", "--training.steps", "2"]
    printed, logged = dry(argv).splitlines(), []
    with mock.patch.object(notes, "log", logged.extend):
        train(combine(argv))
    return printed, [note for note in logged if note.name != "kernels"]  # a dry run allocates nothing on the device


def test_a_run_logs_the_notes_that_its_dry_run_prints(ranks, tiny, tmp_path):
    ((printed, logged),) = ranks(1).run(notes_of_both, tiny, tmp_path / "run")
    names = {"model", "ranks", "computation", "optimizer", "run folder", "data", "steps", "epochs", "checkpoints"}
    assert {note.name for note in logged} >= names
    for note in logged:
        free = (
            note.text.rpartition("; ")[0] if note.name == "checkpoints" else note.text
        )  # others write to the disk too
        assert any(line.startswith(f"{note.name:<14}{free}") for line in printed), note


def both(cases):
    """Return, for each command line, the error lines of a dry run and of a run."""
    return [(dry(argv), error_line(argv)) for argv in cases]


def test_a_dry_run_refuses_what_a_run_refuses_with_the_same_line(ranks, tiny, hf_model, tmp_path):
    (tmp_path / "one.txt").write_text("a few words")
    (tmp_path / "junk.jsonl").write_bytes(b"\xff\n")
    damaged = shutil.copytree(hf_model, tmp_path / "damaged")
    largest = max(damaged.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    of_hf = ["--model.huggingface", str(hf_model), "--checkpoint.init_from"]
    without_overrides = tmp_path / "plain.toml"
    without_overrides.write_text(Path(tiny[1]).read_text().replace("overrides", "# overrides"))
    plain = ["--config", str(without_overrides)]
    cases = {
        "missing model": [*tiny, "--checkpoint.init_from", str(tmp_path)],
        "another model": [*tiny, "--checkpoint.init_from", str(hf_model), "--model.overrides.n_layers", "3"],
        "damaged model": [*plain, *of_hf, str(damaged)],
        "few tokens": [*tiny, "--data.path", str(tmp_path / "one.txt")],
        "no document": [*tiny, "--data.dataset", "jsonl", "--data.path", str(tmp_path / "junk.jsonl")],
        "unknown dataset": [*tiny, "--evaluation.interval_steps", "2", "--evaluation.keep_best_on", "wiki"],
        "vocabulary": [*tiny, "--model.overrides.vocab_size", "1000"],
        "long prompt": [*tiny, "--samples.prompts", '["%s"]' % ("word " * 40)],
        "profiled step": [*tiny, "--training.epochs", "0.001", "--profiling.first_step", "9000"],
        "service": [*tiny, "--metrics.sinks", '["jsonl", "mlflow"]', "--metrics.mlflow_tracking_uri", "ftp://x"],
        "load_step": [*tiny, "--checkpoint.load_step", "3"],
        "file for stores": [*tiny, "--data.store_folder", str(tmp_path / "one.txt")],
        "link for stores": [*tiny, "--data.store_folder", str(tmp_path / "link")],
        "link for runs": [*tiny, "--run.name", "link"],
    }
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path / "gone")
    out = ["--run.output_folder", str(tmp_path / "out")]
    (lines,) = ranks(1).run(both, [[*words, *out] for words in cases.values()])
    for name, (of_dry_run, of_run) in zip(cases, lines, strict=True):
        assert of_dry_run == of_run != "", name


def each(cases):
    return [dry(argv) for argv in cases]


def test_a_folder_that_a_run_cannot_use_is_refused_and_a_lock_stays(ranks, tiny, tmp_path):
    (tmp_path / "file").touch()
    lock = try_lock(tmp_path / "run" / ".lock", 0)
    cases = [[*tiny, *in_folder(tmp_path / name)] for name in ("run", "file", "file/run")]
    ((line, is_file, below_a_file),) = ranks(1).run(each, cases)
    assert is_file == f"--run.name file: {tmp_path}/file is a file, not a folder"
    assert below_a_file == f"--run.output_folder {tmp_path}/file: {tmp_path}/file is a file, not a folder"
    holder = (tmp_path / "run" / ".lock").read_text().strip()
    assert f"run folder    {tmp_path}/run is in use by {holder}: until it ends, this run would be refused\n" in line
    assert "\ncheckpoints   " in line, "the data were looked at"
    assert line.endswith(f"nothing was written; it would be refused now, because {tmp_path}/run is in use\n")
    lock.close()


def large(tiny, folder):
    """Dry runs of a dataset that is too large to be prepared: unprepared, without a readable document, and prepared."""
    argv = [*tiny, *in_folder(folder / "run"), "--data.store_folder", str(folder / "stores")]
    limit = [(trial, "PREPARED_BYTES", 0)]
    junk = [*argv, "--data.dataset", "jsonl", "--data.path", str(folder / "junk.jsonl")]
    mixed = [*junk[:-1], str(folder / "*.jsonl")]
    empty = [*junk[:-1], str(folder / "empty.jsonl")]
    epochs = [*argv, "--training.epochs", "2"]
    with mock.patch.object(trial, "locate", side_effect=AssertionError("the files are hashed")):
        outputs = [dry(words, limit) for words in (argv, junk, mixed, empty, epochs)]
    assert not (folder / "stores").exists()
    train(combine([*argv, "--training.steps", "1"]))
    return [*outputs, dry(argv, limit)]


def test_of_a_large_dataset_the_first_documents_are_read(ranks, tiny, tmp_path):
    (tmp_path / "junk.jsonl").write_text("{}\n" * 200)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "a.jsonl").write_text("{}\n" * 3)
    (tmp_path / "b.jsonl").write_text('{"text": "four words of text"}\n' * 7)
    ((unprepared, junk, mixed, empty, epochs, prepared),) = ranks(1).run(large, tiny, tmp_path)
    assert (
        "data          200 files, 0.00 GB, which the run prepares first; 100 of the first 100 documents are"
        in unprepared
    )
    assert "7 of the first 100 documents are readable and have " in mixed and "; refused: " in mixed
    found = "this dataset contains no readable document; found 1 file ("
    assert empty.startswith(f"--data.path {tmp_path}/empty.jsonl: {found}") and empty.endswith(") without a document")
    assert "steps         those of 2 epochs, " in epochs and "checkpoints   an unknown number of " in epochs
    assert "epochs" not in unprepared and "epochs        " in prepared
    line = "none of the first 100 documents is readable; the first: "
    line += f"{tmp_path}/junk.jsonl:1: the record has no field 'text', "
    assert junk.startswith(f"--data.path {tmp_path}/junk.jsonl: {line}")


def test_a_dry_run_of_two_ranks_is_one_process_that_writes_nothing(tiny, tmp_path):
    stores = Path(tiny[1]).parent
    before = content(stores)
    layout = ["--parallel.tp", "2", "--dry-run"]
    with tempfile.TemporaryDirectory(
        prefix="dry-"
    ) as temporary:  # short: the address of a socket has 108 bytes at most
        done = call(SCRIPT, *tiny, *layout, cwd=tmp_path, NGPU="2", TMPDIR=temporary)
        assert not list(Path(temporary).iterdir())
    errors = [line for line in done.stderr.splitlines() if " simulating: " not in line]  # progress on a slow machine
    assert (done.returncode, errors) == (0, [])
    assert "ranks         2 x CPU (tp 2)\n" in done.stdout and " at the peak of a rank (planned); " in done.stdout
    assert content(stores) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ranks_per_node", "fits"), [(1, True), (2, False)])
def test_the_planned_memory_of_all_ranks_of_a_node_must_be_free(monkeypatch, capsys, ranks_per_node, fits):
    monkeypatch.setattr(dry_run, "memory_available", lambda: 1.5 * 2**30)
    config, largest = Config(training=TrainingConfig(steps=40)), SimpleNamespace(peak=2**30)
    plan = SimpleNamespace(config=config, fits=True, is_tight=False, largest=largest, tokens_per_second=100.0)
    plan.seconds_after = lambda done: 2.0 * (40 - done)
    assert dry_run._report_plan(plan, ranks_per_node, torch.device("cpu"), 10, is_rate_known=True) is fits
    memory, time = capsys.readouterr().out.splitlines()
    assert memory == "memory        1.00 GiB at the peak of a rank (planned); 1.50 GiB of this node are free"
    assert time.startswith(
        "time          1m00s for 30 steps, 100 tokens/s (planned from typical rates of a CPU; small "
    )


@pytest.mark.parametrize(("times_peak", "is_tight"), [(2.0, False), (1.05, True)])
def test_a_run_that_leaves_little_memory_free_is_tight(tiny, monkeypatch, capsys, times_peak, is_tight):
    config = load_config([*tiny, "--training.steps", "2"])
    peak = estimate(config, Hardware(1, this_machine(), False)).largest.peak / 2**30
    accelerator = replace(this_machine(), memory_gib=peak * times_peak)
    plan = estimate(config, Hardware(1, accelerator, False))
    monkeypatch.setattr(dry_run, "memory_available", lambda: None)
    assert dry_run._report_plan(plan, 1, torch.device("cpu"), 0, is_rate_known=False)
    memory, _ = capsys.readouterr().out.splitlines()
    margin = f"; tight: {margin_text(plan)} should stay free"
    assert (
        memory
        == f"memory        {format_bytes(plan.largest.peak)} at the peak of a rank (planned){margin if is_tight else ''}"
    )


def test_a_dry_run_of_one_process_is_that_of_the_launcher(monkeypatch):
    started = []
    monkeypatch.setattr(train_py.os, "execv", lambda *words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["train.py", "--training.steps", "5", "--dry-run"])
    for name in ("NGPU", "NNODES", "NODE_RANK"):
        monkeypatch.setenv(name, "7")
    train_py.run_dry()
    launcher = str(ROOT / "trainer" / "launch.py")
    assert started == [(sys.executable, [sys.executable, launcher, "--training.steps", "5", "--dry-run"])]
    assert [os.environ[name] for name in ("NGPU", "NNODES", "NODE_RANK")] == ["1", "1", "0"]


def test_a_rank_of_torchrun_refuses_a_dry_run(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as exit, one_line_errors():
        train_py.run_dry()
    line = "--dry-run: needs no ranks; start run_llama_train.sh, which knows their number from NGPU and NNODES\n"
    assert (exit.value.code, capsys.readouterr().err) == (2, line)


@pytest.mark.parametrize(
    ("revision", "but"), [("", ""), ("0" * 40, " but the download to the cache of huggingface_hub")]
)
def test_the_last_line_names_a_download(capsys, revision, but):
    assert dry_run._end(Config(model=ModelConfig(revision=revision))) == 0
    assert capsys.readouterr().out == f"dry run complete: nothing was written{but}\n"
