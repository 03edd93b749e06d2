"""Each answer is found where docs/chat.md says, and the number of renderings does not depend on the number of answers."""

import itertools
import random

import pytest

from tests.data.chat.examples import CHATML, DEFAULT
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template import ChatTemplate, TemplateFailure
from trainer.data.chat.template_files import BUILT_IN


def talk(turns: int, seed: int = 0) -> list[dict]:
    generator = random.Random(seed)
    words = ["a", " b", "\n", "<|eot_id|>", "\u00e9", " ", "An answer."]
    messages = [{"role": "system", "content": "s"}]
    for i in range(turns):
        question = {"role": "user", "content": f"{i}{''.join(generator.choices(words, k=5))}"}
        answer = {"role": "assistant", "content": f"{''.join(generator.choices(words, k=5))}{i}"}
        if generator.random() < 0.2:
            call = {"function": {"name": "f", "arguments": {"n": i}}}
            messages += [
                question,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "content": f"r{i}"},
                answer,
            ]
        else:
            messages += [question, answer]
    return messages


@pytest.fixture
def renderings(monkeypatch) -> list[int]:
    """The number of messages of each rendering."""
    counts, render = [], ChatTemplate.render

    def counted(self, names, data, add_generation_prompt):
        counts.append(len(data["messages"]))
        return render(self, names, data, add_generation_prompt)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    return counts


@pytest.mark.parametrize(("name", "tokenizer"), [("llama3", DEFAULT), ("chatml", CHATML)])
def test_the_number_of_renderings_does_not_grow_with_the_number_of_answers(name, tokenizer, renderings):
    chat = load_chat_format(name, tokenizer)
    numbers = []
    for turns in (60, 240):
        renderings.clear()
        chat.encode(talk(turns))
        numbers.append(len(renderings))
    assert numbers[0] == numbers[1] < 10


@pytest.mark.parametrize("name", ["llama3", "chatml"])
@pytest.mark.parametrize("seed", range(3))
def test_each_answer_of_a_long_conversation_is_where_its_prompt_ends(name, seed):
    """Every prompt is rendered here, which encode() does only for the first answer behind each role."""
    chat = load_chat_format(name, CHATML)
    messages = talk(25, seed)
    tokens, targets = chat.encode(messages)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.prompt(messages[:i])
            assert tokens[: len(prompt)] == prompt
            spans.append(len(prompt))
    starts = [i for i, target in enumerate(targets) if target and not targets[i - 1]]
    assert starts == spans


LOOP = (
    "{% for m in messages %}{{ m.role }}:BODY<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def trained(chat: ChatFormat, messages: list[dict]) -> list[str]:
    """Return the text of each range of targets."""
    pairs = zip(*chat.encode(messages), strict=True)
    ranges = [(is_target, list(group)) for is_target, group in itertools.groupby(pairs, key=lambda pair: pair[1])]
    return [chat.tokenizer.decode([token for token, _ in group]) for is_target, group in ranges if is_target]


@pytest.mark.parametrize(
    ("body", "rewritten", "written", "is_noticed"),
    [
        ("{{ m.content }}{{ '!' if loop.last and m.role == 'assistant' }}", 9, "a!", True),
        ("{{ '(' if loop.index == 8 and loop.length > 8 }}{{ m.content }}", 3, "(a", False),
        ("{{ m.content }}{{ '.' if loop.index == 8 and loop.length > 8 }}", 3, "a.", False),
        ("{{ m.content }}{{ '.' if m.mood and not loop.last }}", 5, "a.", False),
        ("{{ '*' if loop.revindex == 15 }}{{ m.content }}", 2, "*a", False),
    ],
)
def test_an_answer_that_a_template_rewrites_is_a_target_as_it_is_written(body, rewritten, written, is_noticed):
    chat = ChatFormat.compile(LOOP.replace("BODY", body), DEFAULT)
    messages = [m for _ in range(10) for m in ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})]
    messages[11] = messages[11] | ({"mood": "good"} if "mood" in body else {})
    expected = ["a<|eot_id|>"] * 10
    expected[rewritten] = f"{written}<|eot_id|>"
    assert trained(chat, messages) == expected
    assert chat.rewrites_turns == is_noticed


ANSWER = [
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
]


def test_an_answer_at_the_beginning_is_found_although_its_prompt_cannot_be_rendered():
    chat = ChatFormat.compile("{{ messages[0].role }}|" + LOOP.replace("BODY", "{{ m.content }}"), DEFAULT)
    assert trained(chat, ANSWER) == ["Hi.<|eot_id|>", "a<|eot_id|>"]


@pytest.mark.parametrize(
    ("template", "targets"),
    [
        # The prompt opens a tag that earlier answers, or answers that are calls, do not have.
        (
            LOOP.replace("BODY", "{{ m.content }}").replace("assistant:{% endif", "assistant:<think>\n{% endif"),
            ["a", "<b>"],
        ),
        # The text before an answer at the beginning is shorter than the prompt.
        (
            "{% for m in messages %}{{ '\n' if loop.index0 }}{{ m.role }}:{{ m.content }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}\nassistant:{% endif %}",
            ["a", "<b>"],
        ),
        # No text of the template separates a question from its answer.
        ("{% for m in messages %}{{ m.content }}{{ '<|eot_id|>' if m.role == 'assistant' }}{% endfor %}", ["a", "<b>"]),
    ],
)
def test_an_answer_begins_behind_what_it_has_of_the_prompt(template, targets):
    chat = ChatFormat.compile(template, DEFAULT)
    for i in (0, 1):
        talk = [
            {"role": role, "content": text}
            for role, text in zip(["user", "assistant"] * 2, ["q", "a", "r", "<b>"], strict=True)
        ]
        assert trained(chat, talk[i:]) == [f"{text}<|eot_id|>" for text in targets]


def test_two_answers_in_a_row_are_two_ranges():
    template = "{% for m in messages %}{{ m.content }}{{ '<|eot_id|>\n' if m.role == 'assistant' }}{% endfor %}"
    talk = [{"role": "user", "content": "q"}, *({"role": "assistant", "content": text} for text in "ab")]
    assert trained(ChatFormat.compile(template, DEFAULT), talk) == ["a<|eot_id|>", "b<|eot_id|>"]


def test_a_template_that_writes_an_answer_again_behind_others_is_refused():
    chat = ChatFormat.compile(LOOP.replace("BODY", "{{ messages[0].content }}{{ m.content }}"), DEFAULT)
    with pytest.raises(TemplateFailure, match=r"^the template writes the texts of messages 1 and 2 into each other$"):
        chat.encode(ANSWER)


def test_a_call_whose_arguments_are_written_in_parts_is_one_range():
    body = (
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% for name, text in c.function.arguments.items() %}"
        "{{ name }}{% for part in text.split('-') %}[{{ part }}]{% endfor %}{% endfor %}{% endfor %}"
    )
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "1-2-3"}}}]},
    ]
    assert trained(ChatFormat.compile(LOOP.replace("BODY", body), DEFAULT), talk) == ["fx[1][2][3]<|eot_id|>"]


def test_answers_without_own_text_are_located():
    chat = ChatFormat.compile(LOOP.replace("BODY", "{{ m.content | indent }}"), DEFAULT)
    messages = [
        m for _ in range(5) for m in ({"role": "user", "content": "q\nr"}, {"role": "assistant", "content": "a\nb"})
    ]
    tokens, targets = chat.encode(messages)
    assert DEFAULT.decode([t for t, target in zip(tokens, targets, strict=True) if target]) == "a\n    b<|eot_id|>" * 5


@pytest.mark.parametrize("begin", ["{% generation %}", "{%- generation -%}{% generation %}"])
def test_generation_tags_have_no_effect_on_tokens_and_targets(begin):
    end = begin.replace("generation", "endgeneration")
    tagged = (
        BUILT_IN["llama3"]
        .read_text()
        .replace("{{- message.content | trim -}}", f"{begin}{{{{- message.content | trim -}}}}{end}")
    )
    messages = talk(10)
    chat = ChatFormat.compile(tagged, DEFAULT)
    assert chat.has_generation_tags
    assert chat.encode(messages) == load_chat_format("llama3", DEFAULT).encode(messages)
