"""Metrics of tasks."""

import math

import numpy as np
import pytest

from trainer.base.config import TaskConfig
from trainer.data.tasks.questions import Question
from trainer.objective.task_metrics import chance_level, choices_values, continuation_values, exact_values, means

NONE = np.empty(0)


def question(*continuations, right=0):
    requests = tuple(("q", text) for text in continuations)
    return Question(key="0", requests=requests, continuations=continuations, right=right)


def values(*log_probs, unconditional=(), right=0, choices=("aa", "bbbb"), **options):
    asked = question(*choices, right=right)
    return choices_values(TaskConfig(**options), asked, np.array(log_probs), np.array(unconditional))


def test_lengths_are_characters_or_bytes_of_the_choices():
    result = values(-4.0, -6.0, choices=("ab", "éééé"), right=1)
    assert (result["acc"], result["acc_norm"], result["acc_bytes"]) == (0.0, 1.0, 1.0)
    result = values(-4.0, -10.0, choices=("ab", "éééé"), right=1)  # per character -2 and -2.5, per byte -2 and -1.25
    assert (result["acc_norm"], result["acc_bytes"]) == (0.0, 1.0)


def test_leading_space_counts_unless_the_option_says_otherwise():
    choices = (" a", "bb")  # with the space -2 and -2.25, without it -4 and -2.25
    assert values(-4.0, -4.5, choices=choices)["acc_norm"] == 1.0
    result = values(-4.0, -4.5, choices=choices, count_leading_space=False)
    assert (result["acc_norm"], result["bytes"]) == (0.0, 2.0), "bits_per_byte counts all bytes of the text"


def test_the_first_of_equal_choices_is_chosen():
    assert values(-1.0, -1.0)["acc"] == 1.0
    assert values(-1.0, -1.0, right=1)["acc"] == 0.0


def test_mutual_information_subtracts_the_unconditional_log_probability():
    result = values(-4.0, -6.0, unconditional=(-1.0, -5.0), right=1)
    assert (result["acc"], result["acc_mutual_info"]) == (0.0, 1.0)


def test_the_probability_of_the_right_choice_is_a_share_of_all_choices():
    assert values(math.log(0.1), math.log(0.3), right=1)["right_probability"] == pytest.approx(0.75)
    assert values(-1000.0, -2000.0)["right_probability"] == 1.0


def test_bits_per_byte_are_all_bits_by_all_bytes():
    task = TaskConfig(kind="continuation", metrics=("bits_per_byte", "acc"))
    of_questions = [
        continuation_values(question("ab"), -2 * math.log(2), True),
        continuation_values(question("éé"), -10 * math.log(2), False),
    ]
    assert means(task, of_questions) == pytest.approx({"bits_per_byte": 12 / 6, "acc": 0.5})


def test_an_empty_choice_has_length_1():
    assert values(0.0, -1.0, choices=("", "b"))["acc_norm"] == 1.0


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (" 18\n", {}, 1.0),
        ("18.", {}, 0.0),
        ("18.", {"ignore_punctuation": True}, 1.0),
        ("Eighteen", {}, 0.0),
        ("Eighteen", {"ignore_case": True}, 1.0),
        ("is 3. So #### 18", {}, 0.0),
        ("#### 3, no #### 18 ", {"answer_pattern": r"#### (\d+)"}, 1.0),
        ("#### 18, no #### 3", {"answer_pattern": r"#### (\d+)"}, 0.0),
        ("it is 18", {"answer_pattern": r"\d+"}, 1.0),
        ("none", {"answer_pattern": r"(\d+)"}, 0.0),
    ],
)
def test_a_generated_text_is_compared_after_normalization(text, options, expected):
    task = TaskConfig(kind="exact", **options)
    assert exact_values(task, question("18", "eighteen"), text) == {"exact_match": expected}


def test_the_pattern_finds_the_answer_in_right_answers_too():
    task = TaskConfig(kind="exact", answer_pattern=r"#### (\d+)")
    assert exact_values(task, question("6 * 3 = 18\n#### 18"), "so #### 18") == {"exact_match": 1.0}


@pytest.mark.parametrize("log_probs", [(math.nan, -1.0), (-1.0, -math.inf)])
def test_log_probabilities_that_are_not_finite_are_no_score(log_probs):
    assert all(math.isnan(value) for value in values(*log_probs).values())


def test_continuations_and_texts_that_are_not_finite_are_no_score():
    assert math.isnan(continuation_values(question("a"), math.nan, False)["acc"])
    assert math.isnan(exact_values(TaskConfig(kind="exact"), question("a"), None)["exact_match"])


def test_chance_is_the_mean_share_of_one_choice():
    questions = [question("a", "b"), question("a", "b", "c", "d")]
    assert chance_level(TaskConfig(), questions) == {"chance": 0.375}
    assert chance_level(TaskConfig(kind="exact"), questions) == {}
