"""Scores during training are those of lm-evaluation-harness on the export, request by request, and the comparison finds bugs."""

import json
import random
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from tests import lm_eval_tasks
from tests.faults.harness import WORDS
from tests.training_runs import checkpoint_of, combine, in_folder, records, train
from trainer.base.config import TaskConfig
from trainer.batch import IGNORE_INDEX
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.data.tasks import encode as encoding
from trainer.data.tasks import packed_requests
from trainer.data.tasks.questions import read_questions
from trainer.objective import task_metrics

pytest.importorskip("lm_eval")
KINDS = {"which": "choices", "next": "continuation", "write": "exact"}
LIMIT = 1e-5


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of a run with two tasks, some of whose requests are longer than a sample."""
    folder, rng = tmp_path_factory.mktemp("lm_eval"), random.Random(1)
    text = lambda low, high: " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))  # noqa: E731
    choices = [
        {
            "question": text(0, 40),
            "choices": [" " + text(1, 6) for _ in range(rng.randint(2, 4))],
            "label": rng.randint(0, 1),
        }
        for _ in range(20)
    ]
    choices[3]["question"] += " \n"
    continuations = [{"context": text(1, 20), "continuation": " " + text(1, 5)} for _ in range(10)]
    prompts = [{"context": text(1, 12), "answers": [text(1, 1)]} for _ in range(8)]
    given = {"evaluation.interval_steps": "4", "data.held_out_fraction": "0", "optimizer.lr": "3e-2"}
    for (name, kind), rows in zip(KINDS.items(), (choices, continuations, prompts), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given[f"evaluation.tasks.{name}.path"] = str(folder / f"{name}.jsonl")
        given[f"evaluation.tasks.{name}.kind"] = kind
        given[f"evaluation.tasks.{name}.delimiter"] = "" if kind != "exact" else " "
        given[f"evaluation.tasks.{name}.save_requests"] = "true"
    return given | {"evaluation.tasks.write.max_new_tokens": str(lm_eval_tasks.MAX_NEW_TOKENS)}


@pytest.fixture(scope="module")
def argv(tiny, settings):
    return [*tiny, *(word for key, value in settings.items() for word in (f"--{key}", value))]


@pytest.fixture(scope="module")
def expected(ranks, argv, settings, tmp_path_factory):
    """Results of lm-evaluation-harness on the export of a run without bugs."""
    folder = tmp_path_factory.mktemp("reference")
    ranks(1).run(train, combine([*argv, *in_folder(folder / "run")]))
    write_huggingface(open_weights(checkpoint_of(folder / "run"), alone=True), folder / "export", torch.float32)
    for name, kind in KINDS.items():
        task = TaskConfig(path=settings[f"evaluation.tasks.{name}.path"], kind=kind, delimiter="")
        lm_eval_tasks.write_task(folder / "tasks", name, kind, read_questions(task, "")[0])
    model = lm_eval_tasks.of_transformers(folder / "export", max_length=32)
    return lm_eval_tasks.evaluate(model, folder / "tasks", [*KINDS])


def differences(folder, expected):
    """Return what differs from lm-evaluation-harness: log-probabilities of a task, or a metric."""
    found = []
    for name, kind in KINDS.items():
        file = folder / "tasks" / name / "step-00000004.jsonl"
        if kind == "exact":
            ours = [json.loads(line)["text"] for line in file.read_text().splitlines()]
            found += [f"texts of {name}"] * (ours != lm_eval_tasks.texts(expected, name))
            continue
        ours = lm_eval_tasks.own_scores(file)
        if not lm_eval_tasks.largest_difference(ours, lm_eval_tasks.scores(expected, name)) < LIMIT:
            found.append(f"requests of {name}")
        (record,) = (record for record in records(folder, "task") if record["task"] == name)
        for key, value in expected["results"][name].items():
            metric = key.partition(",")[0]
            if metric in record and record[metric] != value:
                found.append(f"{metric} of {name}")
    return found


def test_each_request_has_the_log_probability_of_lm_evaluation_harness(ranks, argv, expected, tmp_path):
    ranks(1).run(train, combine([*argv, *in_folder(tmp_path / "run")]))
    assert differences(tmp_path / "run", expected) == []
    metrics = {key.partition(",")[0] for key in expected["results"]["which"]}
    assert {"acc", "acc_norm", "acc_bytes", "acc_mutual_info"} <= metrics


# ---------------------------------------------------------------- bugs


@contextmanager
def context_alone():
    """Encode the continuation without the context."""

    def call(self, context, continuation):
        before = encoding.encode(self.tokenizer, context.rstrip(), None) or [encoding.before_empty(self.tokenizer)]
        return encoding.fitted(before, encoding.encode(self.tokenizer, continuation, False), self.max_tokens)

    with mock.patch.object(encoding.RequestEncoder, "__call__", call):
        yield


@contextmanager
def doubled_bos():
    original = encoding.fitted
    with mock.patch.object(encoding, "fitted", lambda before, after, n: original([before[0], *before], after, n)):
        yield


@contextmanager
def changed_batch(change):
    """Change each batch of requests."""
    original = packed_requests.PackedRequests.__getitem__
    changed = lambda self, rows: change(original(self, rows))  # noqa: E731
    with mock.patch.object(packed_requests.PackedRequests, "__getitem__", changed):
        yield


def shifted_labels(batch):
    labels = batch.labels.roll(1, dims=1)
    labels[:, 0] = IGNORE_INDEX
    return batch._replace(labels=labels)


def without_document_mask(batch):
    return batch._replace(last_readers=batch.last_readers.amax(1, keepdim=True).expand_as(batch.last_readers))


@contextmanager
def lost_request():
    """Lose the last sample of a task."""
    original = packed_requests.PackedRequests.__len__
    with mock.patch.object(packed_requests.PackedRequests, "__len__", lambda self: original(self) - 1):
        yield


@contextmanager
def tokens_as_length():
    """Normalize by the number of words, which are tokens here."""
    original = task_metrics.choices_values

    def values(task, question, log_probs, unconditional):
        lengths = np.array([len(text.split()) for text in question.continuations])
        found = original(task, question, log_probs, unconditional)
        return found | {"acc_norm": float((log_probs / lengths).argmax() == question.right)}

    with mock.patch("trainer.tasks.choices_values", values):
        yield


BUGS = {
    "the context is tokenized alone": context_alone,
    "BOS is doubled": doubled_bos,
    "labels are shifted": lambda: changed_batch(shifted_labels),
    "the document mask is dropped": lambda: changed_batch(without_document_mask),
    "a request is lost at the end": lost_request,
    "lengths are tokens": tokens_as_length,
}


def train_with_bug(argv, bug):
    with BUGS[bug]():
        train(argv)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_finds_a_bug(ranks, argv, expected, tmp_path, bug):
    ranks(1).run(train_with_bug, combine([*argv, *in_folder(tmp_path / "run")]), bug)
    assert differences(tmp_path / "run", expected)
