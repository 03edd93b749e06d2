"""Answers are located in a time that is linear in their number, and each prompt is checked as docs/chat.md says."""

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
    assert numbers[0] == numbers[1] < 40


@pytest.mark.parametrize("name", ["llama3", "chatml"])
@pytest.mark.parametrize("seed", range(3))
def test_each_answer_of_a_long_conversation_is_where_its_prompt_ends(name, seed):
    """Every prompt is rendered here, which encode() does only for the first and the last answer of each kind."""
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
DIFFERS = "the template renders message {} differently in a prompt or in a longer conversation; mark the answers with "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # Answers are of several kinds because the template writes different texts around them, or because their fields differ.
        ("{{ m.content }}{{ '!' if loop.last and m.role == 'assistant' }}", 2),
        ("{{ '(' if loop.index == 8 and loop.length > 8 }}{{ m.content }}", 8),
        ("{{ m.content }}{{ '.' if loop.index == 8 and loop.length > 8 }}", 8),
        ("{{ m.content }}{{ '.' if m.mood and not loop.last }}", 12),
        ("{{ '*' if loop.revindex == 15 }}{{ m.content }}", 6),
    ],
)
def test_a_template_that_rewrites_one_kind_of_answers_is_noticed(body, message):
    chat = ChatFormat.compile(LOOP.replace("BODY", body), DEFAULT)
    messages = [m for _ in range(10) for m in ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})]
    messages[11] = messages[11] | {"mood": "good"}
    with pytest.raises(TemplateFailure) as failure:
        chat.encode(messages)
    assert str(failure.value).startswith(DIFFERS.format(message))


def test_a_prompt_that_cannot_be_rendered_is_named():
    chat = ChatFormat.compile("{{ messages[0].content }}" + LOOP.replace("BODY", "{{ m.content }}"), DEFAULT)
    with pytest.raises(TemplateFailure) as failure:
        chat.encode([{"role": "assistant", "content": "Hi."}])
    assert str(failure.value) == "the template cannot render the prompt for message 1: list object has no element 0"


def test_answers_without_own_text_are_located():
    chat = ChatFormat.compile(LOOP.replace("BODY", "{{ m.content | indent }}"), DEFAULT)
    messages = [
        m for _ in range(5) for m in ({"role": "user", "content": "q\nr"}, {"role": "assistant", "content": "a\nb"})
    ]
    tokens, targets = chat.encode(messages)
    assert DEFAULT.decode([t for t, target in zip(tokens, targets, strict=True) if target]) == "a\n    b<|eot_id|>" * 5


def test_markers_and_prefixes_give_the_same_targets():
    marked = (
        BUILT_IN["llama3"]
        .read_text()
        .replace(
            "{{- message.content | trim -}}",
            "{%- if message.role == 'assistant' -%}{% generation %}{{- message.content | trim -}}",
        )
    )
    marked = marked.replace("{{- '<|eot_id|>' -}}\n{%- endfor -%}", "{{- '<|eot_id|>' -}}{% endgeneration %}{%- else -%}"
                            "{{- message.content | trim + '<|eot_id|>' -}}{%- endif -%}\n{%- endfor -%}")  # fmt: skip
    messages = talk(10)
    assert ChatFormat.compile(marked, DEFAULT).encode(messages) == load_chat_format("llama3", DEFAULT).encode(messages)
