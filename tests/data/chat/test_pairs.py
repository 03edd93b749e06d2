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
        {"question": "q", "chosen": "a", "rejected": "b"},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": [OTHER]},
        {"prompt": [USER], "chosen": ANSWER, "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": OTHER,
        },
    ],
    ids=[
        "separate prompt",
        "shared messages",
        "UltraFeedback",
        "text and messages",
        "question",
        "instruction",
        "single messages",
        "ShareGPT",
    ],
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
        ([], 'the document is a list; a list of messages is written as {"messages": [...]}'),
        ({"prompt": "p", "chosen": "c"}, "the document has no rejected answer; its fields: prompt, chosen"),
        (
            {"prompt": "p", "chosen": "c", "bad": "b"},
            "the document has no rejected answer; its fields: prompt, chosen, bad; data.columns names other fields, such as "
            'data.columns = { rejected = "bad" }',
        ),
        (
            {"query": "p", "chosen": "c", "rejected": "r"},
            "the document has no prompt; its fields: query, chosen, rejected; data.columns names other fields, such as "
            'data.columns = { prompt = "query" }',
        ),
        ({"prompt": "p", "rejected": "c"}, "the document has no chosen answer"),
        ({"chosen": "c", "rejected": "r"}, "the document has no prompt; its fields: chosen, rejected"),
        ({"question": "", "chosen": "c", "rejected": "r"}, "the question is empty"),
        (
            {"query": "q", "good": "c", "worse": "r"},
            "the document's fields (query, good, worse) are not those of a preference pair: chosen and rejected, with prompt, "
            'question, or instruction and input; data.columns names other fields, such as data.columns = { prompt = "query", '
            'rejected = "worse" }',
        ),
        (
            {"messages": [USER, ANSWER]},
            "the document's fields (messages) are not those of a preference pair: chosen and rejected, with prompt, question, or "
            'instruction and input; dataset = "chat" reads conversations',
        ),
        ({"prompt": "p", "chosen": "c", "rejected": "c"}, "the chosen and the rejected answer are equal"),
        (
            {"prompt": "x", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "b"}]},
            "the prompt is not the text of a message that both conversations share",
        ),
        ({"prompt": "p", "chosen": "c", "rejected": ""}, "the rejected answer is empty"),
        ({"prompt": "p", "chosen": " \n", "rejected": "r"}, "the chosen answer is empty"),
        (
            {"prompt": [USER], "chosen": [ANSWER | {"content": " "}], "rejected": [OTHER]},
            "message 2 is an empty answer",
        ),
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


SYSTEM = {"role": "system", "content": "s"}
TOOL = {"name": "f"}


@pytest.mark.parametrize("prompt", [[USER], "q"])
def test_fields_beside_a_pair_belong_to_both_conversations(prompt):
    arguments = {"enable_thinking": True}
    pair = {"prompt": prompt, "chosen": [ANSWER], "rejected": [OTHER], "system": "s", "tools": [TOOL]}
    chosen, rejected, unused = parse_preference(pair | {"chat_template_kwargs": arguments, "score_chosen": 5, "id": 1})
    assert unused == ("score_chosen", "id")
    for document, answer in ((chosen, ANSWER), (rejected, OTHER)):
        expected = Conversation((SYSTEM, USER, answer), (False, False, True), (TOOL,), arguments)
        assert parse_conversation(document) == expected


@pytest.mark.parametrize("name", ["history", "conversations", "messages", "images", "label", "weights", "question"])
def test_a_field_beside_a_pair_that_may_change_what_is_trained_on_is_named(name):
    pair = {"prompt": "p", "chosen": "c", "rejected": "r", name: [ANSWER]}
    with pytest.raises(
        MalformedConversation, match=f"^the document has the field {name}, which may change what is trained on"
    ):
        parse_preference(pair)


def test_messages_that_repeat_the_chosen_conversation_are_no_second_conversation():
    """As in UltraFeedback."""
    chosen = [USER, ANSWER]
    pair = {"prompt": "q", "chosen": chosen, "rejected": [USER, OTHER], "messages": chosen}
    assert parse_preference(pair) == parse_preference({n: v for n, v in pair.items() if n != "messages"})


def test_a_prompt_that_both_answers_repeat_is_not_doubled():
    pair = {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    chosen, rejected = map(parse_conversation, parse_preference(pair)[:2])
    assert (chosen.messages, rejected.messages) == ((USER, ANSWER), (USER, OTHER))


@pytest.mark.parametrize("role", ["user", "system"])
def test_answers_to_different_prompts_are_no_pair(role):
    pair = {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [{"role": role, "content": "other"}, OTHER]}
    with pytest.raises(MalformedConversation) as error:
        parse_preference(pair)
    assert str(error.value) == "the chosen answer begins with a user message, so the two prompts differ"


QUESTION = USER | {"content": "another"}
DIFFER = "the first messages of chosen and rejected differ, so the two prompts differ"


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ([USER, ANSWER], [QUESTION, OTHER], DIFFER),
        ([{"role": "system", "content": "s"}, USER, ANSWER], [USER, OTHER], DIFFER),
        ([USER, ANSWER], [OTHER], DIFFER),
        (
            [USER, ANSWER, USER, ANSWER],
            [USER, ANSWER, QUESTION, OTHER],
            "the chosen answer begins with a user message, so",
        ),
        ([USER], [USER, OTHER], "the chosen conversation has only the message that both share, so no answer"),
        ([USER, ANSWER], [USER], "the rejected conversation has only the message that both share, so no answer"),
        ([ANSWER], [OTHER], "the document has no prompt"),
        ([], [OTHER], "the document has no prompt"),
    ],
)
def test_conversations_that_share_no_question_are_explained(chosen, rejected, reason):
    with pytest.raises(MalformedConversation, match=f"^{reason}"):
        parse_preference({"chosen": chosen, "rejected": rejected})


@pytest.mark.parametrize("given", [{"weight": 0}, {"train": False}])
def test_a_pair_that_is_not_to_be_trained_on_is_bad(given):
    chosen, *_ = parse_preference({"prompt": "p", "chosen": "c", "rejected": "r"} | given)
    with pytest.raises(MalformedConversation, match="the document is marked as not to be trained on"):
        parse_conversation(chosen)
