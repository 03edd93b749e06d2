"""Preference pairs in all layouts."""

import pytest

from trainer.data.chat.conversations import (
    Conversation,
    MalformedConversation,
    PromptCompletion,
    parse_conversation,
)
from trainer.data.chat.pairs import parse_preference

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
OTHER = ANSWER | {"content": "b"}


@pytest.mark.parametrize(
    "pair",
    [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": "q", "chosen": [ANSWER], "rejected": [OTHER]},
    ],
    ids=["separate prompt", "shared messages", "UltraFeedback", "text and messages"],
)
def test_all_layouts_of_pairs_give_the_same_conversations(pair):
    chosen, rejected = map(parse_conversation, parse_preference(pair)[:2])
    assert chosen == Conversation((USER, ANSWER), (False, True))
    assert rejected == Conversation((USER, OTHER), (False, True))


def test_a_pair_of_texts_is_two_completions_of_the_prompt():
    chosen, rejected, _ = parse_preference({"prompt": "p", "chosen": "c", "rejected": "r"})
    assert parse_conversation(chosen) == PromptCompletion("p", "c")
    assert parse_conversation(rejected) == PromptCompletion("p", "r")


def test_earlier_answers_that_both_conversations_share_are_part_of_the_prompt():
    talk = [USER, ANSWER, USER]
    chosen, _, _ = parse_preference({"chosen": [*talk, ANSWER], "rejected": [*talk, OTHER]})
    assert parse_conversation(chosen).loss_mask == (False, False, False, True)


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ([], "the document is not a JSON object"),
        ({"prompt": "p", "chosen": "c"}, "the document has no rejected answer"),
        ({"prompt": "p", "rejected": "c"}, "the document has no chosen answer"),
        ({"chosen": "c", "rejected": "r"}, "the document has no prompt"),
        ({"prompt": "p", "chosen": "c", "rejected": "c"}, "the chosen and the rejected answer are equal"),
        (
            {"prompt": "x", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "b"}]},
            "the prompt is not the text of a message that both conversations share",
        ),
        ({"prompt": "p", "chosen": "c", "rejected": ""}, "the completion is empty"),
        ({"prompt": "p", "chosen": 1, "rejected": 2}, "prompt and completion are neither both text nor both lists"),
        (
            {"prompt": [USER], "chosen": [USER], "rejected": [ANSWER]},
            "the chosen answer begins with a user message, so the",
        ),
        ({"prompt": [USER], "chosen": [], "rejected": [ANSWER]}, "the conversation has no assistant message"),
    ],
)
def test_a_malformed_pair_is_explained(pair, reason):
    with pytest.raises(MalformedConversation) as error:
        for document in parse_preference(pair)[:2]:
            parse_conversation(document)
    assert str(error.value).startswith(reason)
