"""Questions in the names that datasets use, and OLMo's requests."""

import gzip
import json
import re

import pytest

from trainer.base.config import ConfigError, TaskConfig
from trainer.data.tasks.questions import read_questions

CHOICES = ["one", "two", "three"]
REPEATED = {"text": CHOICES, "label": ["1", "2", "3"]}


def read(folder, rows, name="q.jsonl", **options):
    path = folder / name
    data = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return read_questions(TaskConfig(path=str(path), **options), "evaluation.tasks.t")


def problem_of(*args, **options):
    with pytest.raises(ConfigError) as error:
        read(*args, **options)
    assert error.value.key == "evaluation.tasks.t.path"
    return error.value.message


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "choices": CHOICES, "answer": 1},
        {"context": "q", "choices": CHOICES, "label": "1"},
        {"query": "q", "options": CHOICES, "gold": "B"},
        {"prompt": "q", "choices": CHOICES, "answer": "two"},
        {"ctx": "q", "endings": CHOICES, "label": "1"},
        {"question": "q", "choices": REPEATED, "answerKey": "2"},
        {"question": "q", "choices": REPEATED, "answerKey": 2},
        {"question": "q", "choices": {"text": CHOICES, "label": ["A", "B", "C"]}, "answerKey": "B"},
        {"question": "q", "query": "q", "choices": CHOICES, "label": [1]},
    ],
)
def test_a_question_has_the_names_that_datasets_use(tmp_path, row):
    (question,), unused = read(tmp_path, [row])
    assert question.requests == (("q", " one"), ("q", " two"), ("q", " three"))
    assert question.unconditional == (("", " one"), ("", " two"), ("", " three"))
    assert (question.continuations, question.right, unused) == (tuple(CHOICES), 1, [])


def test_the_delimiter_stands_between_but_does_not_count(tmp_path):
    (question,), _ = read(tmp_path, [{"question": "q", "choices": ["a", "b"], "label": 0}], delimiter="\n")
    assert question.requests[0] == ("q", "\na")
    assert question.continuations == ("a", "b")


def test_continuations_and_answers_have_their_own_names(tmp_path):
    rows = [{"context": "q", "target": "x"}, {"text": " a text"}]
    (first, second), _ = read(tmp_path, rows, kind="continuation")
    assert (first.requests, first.continuations) == ((("q", " x"),), ("x",))
    assert (second.requests, second.continuations) == ((("", " a text"),), (" a text",))
    rows = [{"question": "q", "answers": ["4", "four"]}, {"prompt": "q", "answer": 4}, {"prompt": "p", "target": "x"}]
    questions, _ = read(tmp_path, rows, kind="exact")
    assert [q.continuations for q in questions] == [("4", "four"), ("4",), ("x",)]


def test_unused_fields_are_named_once(tmp_path):
    row = {"question": "q", "choices": CHOICES, "answer": 1, "source": "x"}
    _, unused = read(tmp_path, [row, row | {"id": 3}])
    assert unused == ["id", "source"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"choices": CHOICES, "label": 0}, "lacks the context; expected a field context, question, query"),
        ({"question": "q", "label": 0}, "lacks choices; expected a field choices, options, endings"),
        ({"question": "q", "choices": CHOICES}, "lacks the right choice; expected a field label, gold"),
        (
            {"question": "q", "choices": CHOICES, "label": 3},
            "label = 3: must name one of the 3 choices (0 to 2, a letter",
        ),
        ({"question": "q", "choices": CHOICES, "label": -1}, "label = -1: must name one of the 3 choices"),
        ({"question": "q", "choices": CHOICES, "label": True}, "label = true: must name one of the 3 choices"),
        ({"question": "q", "choices": CHOICES, "label": None}, "label = null: must name one of the 3 choices"),
        (
            {"question": "q", "choices": ["B", "A"], "label": "A"},
            'label = "A": may mean the choice with the index 0 or 1;',
        ),
        ({"question": "q", "choices": ["2", "1"], "label": "0"}, None),
        ({"question": "q", "choices": ["2", "1"], "label": "1"}, None),
        (
            {"question": "q", "choices": ["1", "2"], "label": "1"},
            'label = "1": may mean the choice with the index 0 or 1;',
        ),
        ({"question": "q", "choices": REPEATED, "label": "4"}, 'label = "4": must name one of the 3 choices ("1", "2"'),
        (
            {"question": "q", "choices": ["a"], "label": 0},
            "has 1 choice; a question of kind = choices has at least two",
        ),
        ({"question": "q", "choices": [], "label": 0}, "choices: expected a list of choices"),
        ({"question": "q", "choices": ["a", 3], "label": 0}, "choices: expected text, not 3"),
        ({"question": 3, "choices": CHOICES, "label": 0}, "question: expected text, not 3"),
        (
            {"question": "q", "context": "p", "choices": CHOICES, "label": 0},
            "the context stands in context and in question",
        ),
        ({"question": "\ud800", "choices": CHOICES, "label": 0}, "question: contains a lone surrogate"),
        ("[1]", "expected an object with the fields of a question"),
        ("{'a': 1}", "the line is not valid JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, problem):
    good = {"question": "q", "choices": CHOICES, "label": 0}
    if problem is None:
        assert len(read(tmp_path, [good, row])[0]) == 2
        return
    assert problem_of(tmp_path, [good, "", row]).startswith(f"line 3: {problem}")


def test_files_that_cannot_be_read_or_are_empty_are_named(tmp_path):
    assert problem_of(tmp_path, []) == "the file has no questions"
    (tmp_path / "broken.jsonl.gz").write_bytes(b"x")
    with pytest.raises(ConfigError, match="cannot be read: the gzip data is truncated"):
        read_questions(TaskConfig(path=str(tmp_path / "broken.jsonl.gz")), "k")


def test_the_shipped_questions_are_balanced():
    questions, unused = read_questions(TaskConfig(path="python_idioms", delimiter=""), "k")
    assert len(questions) == 40
    assert unused == []
    assert {sum(q.right == i for q in questions) for i in range(4)} == {10}


# ---------------------------------------------------------------- OLMo


def request(doc, idx, label=1, context="q", continuation=None, **more):
    text = {"context": context, "continuation": f" {CHOICES[idx]}" if continuation is None else continuation}
    return {"doc_id": doc, "idx": idx, "label": label, "doc": {"query": "q"}, "request": text | more, "native_id": 7}


def write_config(folder, options):
    (folder / "config.json").write_text(json.dumps({"task_config": {"metric_kwargs": options}}))


def rows_of(doc, **more):
    return [request(doc, idx, **more) for idx in range(3)]


def test_requests_of_a_document_are_one_question_and_those_without_context_are_none(tmp_path):
    write_config(tmp_path, {"uncond_docid_offset": 100})
    rows = [*rows_of(0), *rows_of(1), *rows_of(100, context="Answer:"), *rows_of(101, context="Answer:")]
    rows[0], rows[1] = rows[1], rows[0]  # the order of lines has no meaning
    questions, unused = read(tmp_path, rows, name="requests.jsonl.gz")
    assert [q.key for q in questions] == ["0", "1"]
    assert questions[0].requests == (("q", " one"), ("q", " two"), ("q", " three"))
    assert questions[0].unconditional == tuple(("Answer:", f" {text}") for text in CHOICES)
    assert questions[0].continuations == (" one", " two", " three")
    assert (questions[0].right, unused) == (1, [])


def test_equal_texts_are_different_questions(tmp_path):
    questions, _ = read(tmp_path, [*rows_of(0), *rows_of(1)])
    assert len(questions) == 2
    assert questions[0].unconditional == (("", " one"), ("", " two"), ("", " three"))


def test_the_limit_counts_questions(tmp_path):
    write_config(tmp_path, {"uncond_docid_offset": None})
    questions, _ = read(tmp_path, [*rows_of(0), *rows_of(1), *rows_of(2)], limit=2)
    assert [q.key for q in questions] == ["0", "1"]


def test_labels_of_continuations_are_lists_and_of_answers_texts(tmp_path):
    rows = [request(0, 0, label=["signs"], continuation=" signs")]
    (question,), _ = read(tmp_path, rows, kind="continuation")
    assert question.requests == (("q", " signs"),)
    more = {"stop_sequences": ["Question:", "\n\n"], "generation_kwargs": {"max_gen_toks": 9}}
    (question,), unused = read(tmp_path, [request(0, 0, label="18", **more)], kind="exact")
    assert unused == ["request.generation_kwargs"]
    assert (question.requests, question.continuations) == ((("q", ""),), ("18",))
    assert question.stop == ("Question:", "\n\n")


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        ([*rows_of(0), request(0, 1)], {}, "line 4: repeats doc_id 0, idx 1 of line 2"),
        (rows_of(0)[::2], {}, "line 1, doc_id 0: lacks the request idx 1"),
        (rows_of(0)[:1], {}, "line 1, doc_id 0: has 1 choice"),
        ([*rows_of(0)[:2], request(0, 2, label=0)], {}, "line 1, doc_id 0: its requests have different labels: 0, 1"),
        (rows_of(0, label=5), {}, "line 1, doc_id 0: label = 5: must name one of the 3 choices"),
        (
            rows_of(0),
            {"kind": "continuation"},
            "line 1, doc_id 0: has 3 requests; a question of kind = continuation has one",
        ),
        ([request(0, 0), request("x", 1)], {}, "line 2: expected integers as doc_id and idx"),
        ([request(0, 0), {**request(0, 1), "request": 3}], {}, "line 1, doc_id 0: request 1: expected an object"),
        ([request(0, 0, continuation=3), request(0, 1)], {}, "line 1, doc_id 0: continuation: expected text, not 3"),
    ],
)
def test_a_wrong_request_is_named(tmp_path, rows, options, problem):
    assert problem_of(tmp_path, rows, **options).startswith(problem)


@pytest.mark.parametrize(
    ("docs", "problem"),
    [
        ((0, 1, 100), "line 4, doc_id 1: lacks its unconditional requests, of doc_id 101"),
        ((0, 100, 101), "line 7, doc_id 101: is an unconditional request of doc_id 1, which is missing"),
    ],
)
def test_a_file_that_is_cut_off_is_named(tmp_path, docs, problem):
    write_config(tmp_path, {"uncond_docid_offset": 100})
    assert problem_of(tmp_path, [row for doc in docs for row in rows_of(doc)]) == problem


def test_a_wrong_second_half_is_named(tmp_path):
    write_config(tmp_path, {"uncond_docid_offset": 100})
    other = [request(100, idx, continuation="x") for idx in range(3)]
    assert problem_of(tmp_path, [*rows_of(0), *other]).endswith("its unconditional requests have other continuations")
    (tmp_path / "config.json").write_text("[]")
    assert re.search("config.json is not the config.json of an OLMo task", problem_of(tmp_path, rows_of(0)))
