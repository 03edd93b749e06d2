"""Tasks during training: the same result of each request on every layout, the best checkpoint, early stopping, a resume."""

import json
import os
import random
import signal
from unittest import mock

import numpy as np
import pytest
import torch

from tests.faults.harness import WORDS
from tests.training_runs import (
    combine,
    error_line,
    in_folder,
    lines_logged_by_train,
    records,
    train,
    train_without_code,
)
from trainer.base.config.checkpoints import best_step
from trainer.base.config.load import load_config
from trainer.base.system import console
from trainer.tasks import TaskEvaluator, load_tasks
from trainer.tools.testing.layouts import Layout, flags, num_ranks
from trainer.tools.testing.ranks import RankError

LAYOUTS = [
    "dp_shard=2",
    "dp_shard=4 training.local_batch_size=2",
    "dp_replicate=2 dp_shard=2",
    "dp_shard=2 cpu_offload=true",
    "tp=2",
    "tp=2 sequence_parallel=false",
    "cp=2",
    "cp=2 tp=2",
    "pp=2",
    "pp=2 pipeline_schedule=ZBVZeroBubble model.overrides.n_layers=4",
    "dp_shard=2 cp=2 pp=2",
    "dp_shard=2 data.document_mask=true",
    "cp=2 data.document_mask=true",
    "dp_shard=2 data.packing=best-fit",
    "dp_shard=2 activation_checkpoint.mode=full",
    "dp_shard=2 compile.enabled=true",
]
FAMILIES = {
    "mixtral": ["dp_shard=2 ep=2", "tp=2 ep=2"],
    "gemma3": ["dp_shard=1", "cp=2"],  # windows count the tokens that a request reads, not what stands between
    "gpt-oss": ["tp=2"],
    "deepseek-v3": ["dp_shard=2 ep=2"],
}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Flags of a task of each kind, whose requests are shorter and longer than a sample, with and without a shared context."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(0)
    text = lambda low, high: " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))  # noqa: E731
    choices = [
        {"question": text(0, 30), "choices": [text(1, 6) for _ in range(rng.randint(2, 4))], "label": rng.randint(0, 1)}
        for _ in range(13)
    ]
    continuations = [{"context": text(0, 20), "continuation": text(1, 5)} for _ in range(7)]
    prompts = [{"prompt": text(1, 12), "answers": [text(1, 1), text(1, 1)]} for _ in range(7)]
    settings = {
        "evaluation.tasks.which.path": write_lines(folder / "which.jsonl", choices),
        "evaluation.tasks.next.path": write_lines(folder / "next.jsonl", continuations),
        "evaluation.tasks.next.kind": "continuation",
        "evaluation.tasks.write.path": write_lines(folder / "write.jsonl", prompts),
        "evaluation.tasks.write.kind": "exact",
        "evaluation.tasks.write.max_new_tokens": "6",
        "evaluation.tasks.write.stop": '[" the"]',
        **{f"evaluation.tasks.{name}.save_requests": "true" for name in ("which", "next", "write")},
        "evaluation.interval_steps": "2",
        "data.held_out_fraction": "0",
        "training.steps": "2",
        "optimizer.lr": "1e-9",  # layouts differ in the rounding of updates
    }
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


@pytest.fixture(scope="module")
def on_one_rank(ranks, tiny, tasks, tmp_path_factory):
    """Return a function (settings) -> folder of a run on one rank, which trains once."""
    folder, done = tmp_path_factory.mktemp("one_rank"), {}

    def run(*settings):
        if settings not in done:
            done[settings] = folder / str(len(done))
            ranks(1).run(train, combine([*tiny, *tasks, *settings, *in_folder(done[settings])]))
        return done[settings]

    return run


def results(folder, name):
    (file,) = (folder / "tasks" / name).iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def require_equal(expected, found, ignored=()):
    """Require the same result of each request: log-probabilities to 1e-5, the rest exactly. ignored: keys of records."""
    for name in ("which", "next", "write"):
        a, b = results(expected, name), results(found, name)
        assert a
        log_probs = [np.array([row.pop("log_prob") for row in rows if "log_prob" in row]) for rows in (a, b)]
        np.testing.assert_allclose(log_probs[1], log_probs[0], rtol=1e-5, atol=1e-5)
        assert a == b
    for a, b in zip(records(expected, "task"), records(found, "task"), strict=True):
        for record in (a, b):
            for key in ("tasks_time_s", "timestamp_s", *ignored):
                del record[key]
        assert a == {
            key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value for key, value in b.items()
        }


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_has_the_results_of_one_rank(ranks, on_one_rank, tiny, tasks, tmp_path, text):
    if torch.__version__ < (2, 13) and "ZeroBubble" in text:
        pytest.skip("needs torch 2.13")
    check(ranks, on_one_rank, [*tiny, *tasks], tmp_path, Layout.parse(text), [])


@pytest.mark.parametrize(("family", "text"), [(name, text) for name, texts in FAMILIES.items() for text in texts])
def test_every_kind_of_layer_has_the_results_of_one_rank(ranks, on_one_rank, tiny, tasks, tmp_path, family, text):
    size = ["--model.name", family, "--model.size", "debug", "--model.overrides.vocab_size", "2048"]
    check(ranks, on_one_rank, [*tiny, *tasks], tmp_path, Layout.parse(text), size)


def check(ranks, on_one_rank, argv, folder, layout, model):
    settings = {k: v for k, v in layout.settings.items() if k != "training.local_batch_size"}
    fixed = {k: v for k, v in Layout(layout.text, settings).single_rank_settings.items() if "document_mask" not in k}
    expected = on_one_rank(*model, *flags(fixed))
    argv = combine([*argv, *model, *flags(layout.settings), *in_folder(folder / "run")])
    ranks(num_ranks(load_config(argv).parallel)).run(train_without_code, argv, {})
    require_equal(expected, folder / "run")


def test_a_context_that_is_shared_changes_no_result(ranks, on_one_rank, tiny, tasks, tmp_path):
    ranks(1).run(train_alone, combine([*tiny, *tasks, *in_folder(tmp_path / "run")]))
    require_equal(on_one_rank(), tmp_path / "run", ignored=("num_tokens",))


def train_alone(argv):
    from trainer.data.tasks import packed_requests

    original = packed_requests._units
    alone = lambda requests, indices, seq_len: [u for i in indices for u in original(requests, [i], seq_len)]  # noqa: E731
    with mock.patch.object(packed_requests, "_units", alone):
        train(argv)


# ---------------------------------------------------------------- a run


def test_the_best_checkpoint_and_the_end_follow_a_task(ranks, tiny, tasks, tmp_path):
    argv = [*tiny, *tasks, "--training.steps", "20", "--checkpoint.interval_steps", "2", "--checkpoint.keep", "1"]
    argv += ["--optimizer.lr", "3e-2", "--evaluation.keep_best_on", "which/right_probability"]
    argv += ["--evaluation.early_stopping_patience", "2", *in_folder(tmp_path / "run")]
    argv += ["--evaluation.tasks.next.interval_steps", "19"]
    (lines,) = ranks(1).run(lines_logged_by_train, combine(argv))
    values = [record["right_probability"] for record in records(tmp_path / "run", "task") if record["task"] == "which"]
    best = max(values)
    number = next(i for i in range(len(values)) if i > 1 and max(values[i - 1], values[i]) <= max(values[: i - 1])) + 1
    assert len(values) == number  # two evaluations without a higher score
    assert f"right_probability on which has not risen above {best:.4f} in 2 evaluations" in "\n".join(lines)
    assert [r["step"] for r in records(tmp_path / "run", "task") if r["task"] == "next"] == [2 * len(values)]
    step = 2 * values.index(best) + 2
    assert best_step(tmp_path / "run" / "checkpoints") == step
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08}").exists()


def test_a_run_that_is_killed_during_a_task_resumes_with_the_same_bits(ranks, tiny, tasks, tmp_path):
    argv = combine([*tiny, *tasks, "--training.steps", "6", "--checkpoint.interval_steps", "2"])
    argv = combine([*argv, "--optimizer.lr", "3e-3", "--evaluation.keep_best_on", "which/acc_norm"])
    (whole,) = ranks(1).run(train, [*argv, *in_folder(tmp_path / "whole")])
    with pytest.raises(RankError, match="ended without a result"):
        ranks(1).run(train_until_killed, [*argv, *in_folder(tmp_path / "killed")], 4)
    (resumed,) = ranks(1).run(train, [*argv, *in_folder(tmp_path / "killed")])
    assert (resumed.weights, resumed.random) == (whole.weights, whole.random)
    for name in ("which", "next", "write"):
        for step in (2, 4, 6):
            files = [tmp_path / run / "tasks" / name / f"step-{step:08}.jsonl" for run in ("whole", "killed")]
            assert files[0].read_bytes() == files[1].read_bytes()


def train_until_killed(argv, step):
    """Train until this process kills itself during a task after a step, before the checkpoint of this step."""
    original = TaskEvaluator.run

    def run(self, task, forward, loading, number):
        if number == step and task.name == "write":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, task, forward, loading, number)

    with mock.patch.object(TaskEvaluator, "run", run):
        train(argv)


def test_a_task_changes_nothing_else_of_a_run(ranks, tiny, tasks, tmp_path):
    settings = ["--training.steps", "4", "--optimizer.lr", "3e-3", "--evaluation.interval_steps", "1"]
    argv = combine([*tiny, *tasks, *settings])
    without = combine(
        [*argv, "--evaluation.tasks", "{}", "--data.held_out_fraction", "0", "--evaluation.interval_steps", "0"]
    )
    without = [
        word for pair in zip(without[::2], without[1::2], strict=True) if "tasks." not in pair[0] for word in pair
    ]
    (with_tasks,) = ranks(1).run(train, [*argv, *in_folder(tmp_path / "with")])
    (plain,) = ranks(1).run(train, [*without, *in_folder(tmp_path / "without")])
    assert with_tasks == plain


def test_a_time_limit_ends_a_task_with_whole_questions(ranks, tiny, tasks, tmp_path):
    argv = [
        *tiny,
        *tasks,
        "--evaluation.tasks.which.time_limit_s",
        "1e-9",
        "--evaluation.tasks.write.time_limit_s",
        "1e-9",
    ]
    (lines,) = ranks(1).run(lines_logged_by_train, combine([*argv, *in_folder(tmp_path / "run")]))
    (line,) = ranks(1).run(error_line, combine([*argv, "--evaluation.keep_best_on", "which"]))
    assert line.startswith("--evaluation.tasks.which.time_limit_s 1e-9: must be 0 for the task of keep_best_on")
    numbers = {record["task"]: record["num_questions"] for record in records(tmp_path / "run", "task")}
    assert 0 <= numbers["which"] < 13
    assert (numbers["next"], numbers["write"]) == (7, 2)
    assert "task which: stopped after time_limit_s = 1e-09" in lines


# ---------------------------------------------------------------- wrong tasks


ROW = {"question": "q", "choices": ["a", "b"], "label": 0}
WRONG = {
    "a wrong label": ([ROW | {"label": 2}], {}, "line 1: label = 2: must name one of the 2 choices"),
    "no choice": ([ROW | {"choices": []}], {}, "line 1: choices: expected a list of choices"),
    "no question": ([], {}, "the file has no questions"),
    "a choice without a token": (
        [ROW | {"question": "th", "choices": ["e", "b"]}],
        {"delimiter": ""},
        "question 1: a continuation has a text, but no token of its own",
    ),
    "a label of many digits": ([ROW | {"label": "9" * 5000}], {}, "line 1: label = "),
    "a misspelt name of the labels": (
        [ROW | {"choices": {"text": ["a", "b"], "labels": ["A", "B"]}}],
        {},
        "line 1: choices: unknown field labels; expected text and label",
    ),
    "labels that stand twice": (
        [ROW | {"choices": {"text": ["a", "b"], "label": ["A", "A"]}, "label": "A"}],
        {},
        "line 1: choices: expected one label for each of 2 choices, each another one",
    ),
    "an answer that vanishes": (
        [{"prompt": "q", "answer": "..."}],
        {"kind": "exact", "ignore_punctuation": "true", "max_new_tokens": "4"},
        "question 1: nothing is left of the answer '...' to compare",
    ),
    "stop strings that are no list": (
        [{"doc_id": 0, "idx": 0, "request": {"context": "q", "stop_sequences": "ab"}, "label": "a"}],
        {"kind": "exact", "max_new_tokens": "4"},
        "line 1, doc_id 0: stop_sequences: expected a list of texts",
    ),
    "a long choice": ([ROW, ROW | {"choices": ["a", "b " * 40]}], {}, "question 2: a continuation has"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_task_is_one_line_before_the_first_step(ranks, tiny, tmp_path, case):
    rows, options, message = WRONG[case]
    path = write_lines(tmp_path / "q.jsonl", rows)
    argv = [*tiny, "--evaluation.interval_steps", "1", "--evaluation.tasks.t.path", path, *in_folder(tmp_path / "run")]
    argv += [word for name, value in options.items() for word in (f"--evaluation.tasks.t.{name}", value)]
    (line,) = ranks(1).run(error_line, argv)
    assert line.startswith(f"--evaluation.tasks.t.path {path}: {message}")
    assert not any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["path", "{folder}/missing.jsonl"], "--evaluation.tasks.t.path {folder}/missing.jsonl: no such file"),
        (["path", "{folder}"], "--evaluation.tasks.t.path {folder}: is a folder, not a file"),
        (
            ["path", "python_idioms", "kind", "exact", "answer_pattern", "[0-9]*"],
            "--evaluation.tasks.t.answer_pattern [0-9]*: matches an empty text",
        ),
        (["limit", "3"], '[evaluation.tasks.t] path = "" (default): expected a file of questions, or python_idioms'),
        (
            ["path", "python_idioms", "max_seq_len", "33"],
            "--evaluation.tasks.t.max_seq_len 33: must be at most [training]",
        ),
    ],
)
def test_a_wrong_option_is_one_line(ranks, tiny, tmp_path, argv, message):
    pairs = zip(argv[::2], argv[1::2], strict=True)
    words = [w for name, value in pairs for w in (f"--evaluation.tasks.t.{name}", value.format(folder=tmp_path))]
    words += ["--evaluation.interval_steps", "1", *in_folder(tmp_path / "run")]
    (line,) = ranks(1).run(error_line, [*tiny, *words])
    assert line.startswith(message.format(folder=tmp_path))


def test_a_tokenizer_without_bos_is_named(ranks, tiny, tmp_path):
    path = write_lines(tmp_path / "q.jsonl", [ROW])
    argv = [*tiny, "--evaluation.interval_steps", "4", "--evaluation.tasks.t.path", path, *in_folder(tmp_path / "run")]
    line = "task t: the tokenizer has no BOS token, so EOS stands before continuations without a context"
    assert ranks(1).run(lines_of_load_without_bos, argv) == [[line]]


def lines_of_load_without_bos(argv):
    tokenizer = mock.Mock(bos=None, eos=3, prefix=(), special_tokens={}, encode_parts=lambda p: [5] * sum(map(len, p)))
    config = load_config(argv)
    with mock.patch.object(console, "info") as info:
        load_tasks(config.evaluation, config.data, tokenizer, config.training.seq_len)
    return [call.args[0] for call in info.call_args_list]
