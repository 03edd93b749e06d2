"""Metrics of tasks: functions of the log-probabilities of continuations, or of generated texts, by kind of task.

The metrics of choices with names of lm-evaluation-harness (Gao et al., version 0.4.13) are equal to its own. If several choices
have the same value, the first one is chosen.
"""

import math
import re
import string
from collections.abc import Sequence

import numpy as np

from trainer.base.config import TaskConfig
from trainer.data.tasks.questions import Question

Values = dict[str, float]
"""Metric -> value of one question. For bits_per_byte, its two parts: "bits" and "bytes"."""


def choices_values(task: TaskConfig, question: Question, log_probs: np.ndarray, unconditional: np.ndarray) -> Values:
    """Return the values of a question with choices. They are NaN if a log-probability is not finite.

    Args:
        task: Whether white space at the start of a choice counts.
        question: The question.
        log_probs: Log-probability of each choice, (choices,).
        unconditional: The same after a context that says nothing, (choices,); (0,) if acc_mutual_info is not measured.
    """
    counted = [text if task.count_leading_space else text.lstrip() for text in question.continuations]
    characters = np.array([max(1, len(text)) for text in counted])
    num_bytes = np.array([_num_bytes(text) for text in counted])
    chosen = {"acc": log_probs, "acc_norm": log_probs / characters, "acc_bytes": log_probs / num_bytes}
    if len(unconditional):
        chosen["acc_mutual_info"] = log_probs - unconditional
    values = {name: float(value.argmax() == question.right) for name, value in chosen.items()}
    shares = np.exp(log_probs - log_probs.max())
    values["right_probability"] = float(shares[question.right] / shares.sum())
    values |= _bits(log_probs[question.right], question.continuations[question.right])
    is_finite = np.isfinite(log_probs).all() and np.isfinite(unconditional).all()
    return values if is_finite else dict.fromkeys(values, math.nan)


def continuation_values(question: Question, log_prob: float, is_greedy: bool) -> Values:
    """Return the values of a question with one continuation. is_greedy: whether each of its tokens is the most likely one, which
    is NaN if the log-probability is not finite."""
    acc = float(is_greedy) if math.isfinite(log_prob) else math.nan
    return {"acc": acc} | _bits(log_prob, question.continuations[0])


def exact_values(task: TaskConfig, question: Question, text: str | None) -> Values:
    """Return whether a generated text is one of the right answers. None, if the logits are not finite, gives NaN."""
    if text is None:
        return {"exact_match": math.nan}
    answers = {_normalized(task, _found(task, answer, answer)) for answer in question.continuations}
    return {"exact_match": float(_normalized(task, _found(task, text, "")) in answers)}


def empty_answer(task: TaskConfig, question: Question) -> str | None:
    """Return the first right answer of which nothing is left to compare, or None. Each text without an answer would equal it."""
    return next((a for a in question.continuations if not _normalized(task, _found(task, a, a))), None)


def _found(task: TaskConfig, text: str, otherwise: str) -> str:
    """Return what answer_pattern finds in a text, or `otherwise`."""
    if not task.answer_pattern:
        return text
    matches = [match[1] if match.re.groups else match[0] for match in re.finditer(task.answer_pattern, text)]
    return (matches[-1] or "") if matches else otherwise


def _normalized(task: TaskConfig, text: str) -> str:
    if task.ignore_case:
        text = text.lower()
    if task.ignore_punctuation:
        text = text.translate(str.maketrans("", "", string.punctuation))
    return " ".join(text.split())


def _bits(log_prob: float, text: str) -> Values:
    return {"bits": float(-log_prob / math.log(2)), "bytes": float(_num_bytes(text))}


def _num_bytes(text: str) -> int:
    return max(1, len(text.encode()))


def means(task: TaskConfig, values: Sequence[Values]) -> dict[str, float]:
    """Return the measured metrics of all questions: means, and all bits divided by all bytes."""
    return {metric: _mean(metric, values) for metric in task.measured}


def _mean(metric: str, values: Sequence[Values]) -> float:
    if metric == "bits_per_byte":
        return math.fsum(v["bits"] for v in values) / math.fsum(v["bytes"] for v in values)
    return math.fsum(v[metric] for v in values) / len(values)


def chance_level(task: TaskConfig, questions: Sequence[Question]) -> dict[str, float]:
    """Return the accuracy of choices that are drawn at random, by the name "chance", or {} for other kinds."""
    if task.kind != "choices":
        return {}
    return {"chance": math.fsum(1 / len(question.continuations) for question in questions) / len(questions)}
