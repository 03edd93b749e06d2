import itertools
import json

import pytest

from tests.data.chat.examples import CHATML, CHATML_NAMES, DEFAULT, SYSTEM, TALK, shown
from trainer.base.config import ConfigError
from trainer.data.chat.fields import MalformedConversation
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template import TemplateFailure
from trainer.data.chat.template_files import BUILT_IN

# ---------------------------------------------------------------- token by token


def test_llama_3_token_by_token(llama3):
    user = ["<|start_header_id|>", "u", "ser", "<|end_header_id|>", "\n\n"]
    assistant = ["<|start_header_id|>", "ass", "ist", "ant", "<|end_header_id|>", "\n\n"]
    assert shown(llama3.encode(TALK)) == [
        *["<|begin_of_text|>", "<|start_header_id|>", "sys", "tem", "<|end_header_id|>", "\n\n"],
        *["B", "e", " k", "ind", ".", "<|eot_id|>"],
        *[*user, "W", "ho", "?", "<|eot_id|>"],
        *[*assistant, "+I", "+ a", "+m", "+.", "+<|eot_id|>"],
        *[*user, "S", "o", "?", "<|eot_id|>"],
        *[*assistant, "+Y", "+es", "+<|eot_id|>"],
    ]


def test_chatml_token_by_token(chatml):
    start, end = CHATML_NAMES.values()
    user = [start, "u", "ser", "\n"]
    assistant = [start, "ass", "ist", "ant", "\n"]
    assert shown(chatml.encode(TALK)) == [
        *[start, "sys", "tem", "\n", " B", "e", " k", "ind", ".", " ", end, "\n"],
        *[*user, " W", "ho", "?", " ", end, "\n"],
        *[*assistant, "+I", "+ a", "+m", "+.", "+" + end, "\n"],
        *[*user, "S", "o", "?", end, "\n"],
        *[*assistant, "+ ", "+Y", "+es", "+" + end, "\n"],
    ]


def test_llama_2_token_by_token(char_tokenizer):
    talk = [
        {"role": m["role"], "content": text} for m, text in zip(TALK, ["be", " fox ", "dog", "a?", " z "], strict=True)
    ]
    assert shown(load_chat_format("llama2", char_tokenizer).encode(talk), char_tokenizer) == [
        *["<s>", *"▁[INST]▁<<SYS>>", "<0x0A>", *"be", "<0x0A>", *"<</SYS>>", "<0x0A>", "<0x0A>", *"▁fox▁[/INST]"],
        *["+▁", "+d", "+o", "+g", "+▁", "+</s>"],
        *["<s>", *"▁[INST]▁a?▁[/INST]"],
        *["+▁", "+z", "+▁", "+</s>"],
    ]


FROM_A_FILE = """{%- for m in messages -%}
{{ '<|start_header_id|>' if loop.first }}{{ m.role[0] }}: {% if m.role == 'assistant' %}{{ m.content + eos_token }}
{% else %}
{{ m.content }}|{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}a: {% endif -%}"""


def test_a_template_of_a_hugging_face_folder_token_by_token(tmp_path):
    config = {"chat_template": FROM_A_FILE, "eos_token": {"content": "<|eot_id|>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = load_chat_format(str(tmp_path), DEFAULT)
    assert shown(chat.encode(TALK)) == [
        *[
            "<|start_header_id|>",
            "s",
            ":",
            " ",
            " B",
            "e",
            " k",
            "ind",
            ".",
            " |",
            "u",
            ":",
            " ",
            " W",
            "ho",
            "?",
            " |",
        ],
        *["a", ":", " ", "+I", "+ a", "+m", "+.", "+<|eot_id|>", "\n", "u", ":", " S", "o", "?", "|"],
        *["a", ":", " ", "+ ", "+Y", "+es", "+<|eot_id|>", "\n"],
    ]
    chat.validate_template()
    assert chat.end_of_turn == (DEFAULT.special_tokens["<|eot_id|>"],)


# ---------------------------------------------------------------- equality with inference and other libraries


LONG_TALK = [SYSTEM] + [
    {"role": role, "content": text}
    for question, answer in [
        ("the fox?", "\nno"),
        ("\n\n ", "  dog\n"),
        ("<|eot_id|>", "</s>Lazy"),
        ("12", "\u00e9\U0001f642"),
    ]
    for role, text in (("user", question), ("assistant", answer))
]


def test_training_tokens_equal_each_prompt_followed_by_its_answer(any_chat_format):
    tokens, targets = any_chat_format.encode(LONG_TALK)
    for i in range(2, len(LONG_TALK), 2):
        prompt = any_chat_format.prompt(LONG_TALK[:i])
        assert tokens[: len(prompt)] == prompt
        assert targets[len(prompt)] and not targets[len(prompt) - 1]
        rest = zip(tokens[len(prompt) :], targets[len(prompt) :], strict=True)
        answer = [token for token, _ in itertools.takewhile(lambda pair: pair[1], rest)]
        assert answer[-1] in any_chat_format.end_of_turn
        assert not set(answer[:-1]) & set(any_chat_format.end_of_turn)


def test_every_end_of_turn_is_a_target_and_no_user_token_is(any_chat_format):
    tokens, targets = any_chat_format.encode(LONG_TALK)
    ends = [is_target for t, is_target in zip(tokens, targets, strict=True) if t in any_chat_format.end_of_turn]
    assert ends.count(True) == 4
    boundaries = [i for i in range(1, len(targets)) if targets[i - 1] and not targets[i]]
    assert all(tokens[i - 1] in any_chat_format.end_of_turn for i in boundaries)
    any_chat_format.validate_template()


def test_llama_2_equals_metas_code(bpe_tokenizer):
    """Each pair of question and answer is one text between <s> and </s>, and sentencepiece encodes it as one."""
    talk = [m for m in LONG_TALK if m["role"] != "system"]
    expected, system = [], "<<SYS>>\nthe quick\n<</SYS>>\n\n"
    for question, answer in zip(talk[::2], talk[1::2], strict=True):
        text = f"[INST] {(system + question['content']).strip()} [/INST] {answer['content'].strip()} "
        expected += [bpe_tokenizer.bos, *bpe_tokenizer.encode(text), bpe_tokenizer.eos]
        system = ""
    assert (
        load_chat_format("llama2", bpe_tokenizer).encode([{"role": "system", "content": "the quick"}, *talk])[0]
        == expected
    )


PLAIN_TALK = [
    {"role": "system", "content": "Answer in one word, please."},
    {"role": "user", "content": "What's   2 + 2?\n\nThink \u4e16\u754c."},
    {"role": "assistant", "content": "Four \U0001f642"},
    {"role": "user", "content": "def f(x):\n    return x"},
    {"role": "assistant", "content": "Python."},
]


@pytest.mark.parametrize("name", ["llama3", "chatml", "llama2"])
@pytest.mark.parametrize("messages", [PLAIN_TALK, PLAIN_TALK[1:3], PLAIN_TALK[:2]], ids=["all", "pair", "question"])
def test_tokens_equal_those_of_transformers(tmp_path, name, messages):
    transformers = pytest.importorskip("transformers")
    for file, content in CHATML.huggingface_files().items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "chat_template.jinja").write_text(BUILT_IN[name].read_text())
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = load_chat_format(name, CHATML)
    asks = messages[-1]["role"] == "user"
    expected = hf_tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=asks, return_dict=False)
    assert (chat.prompt(messages) if asks else chat.encode(messages)[0]) == expected


def test_generation_blocks_yield_the_targets_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}<|end_header_id|>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}\n{% else %}{{ m.content }}<|eot_id|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant<|end_header_id|>{% endif %}"
    )
    for file, content in DEFAULT.huggingface_files().items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "chat_template.jinja").write_text(template)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        PLAIN_TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, targets = load_chat_format(str(tmp_path), DEFAULT).encode(PLAIN_TALK)
    assert tokens == expected["input_ids"]
    assert list(map(int, targets)) == expected["assistant_masks"]


# ---------------------------------------------------------------- tools, completions, documents


def test_tool_calls_are_targets_and_their_results_are_not(llama3, chatml):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    for chat, header, said in [
        (llama3, "ipython", ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "Two.<|eot_id|>"]),
        (
            chatml,
            "tool",
            [
                '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|reserved_special_token_1|>',
                "Two.<|reserved_special_token_1|>",
            ],
        ),
    ]:
        tokens, targets = chat.encode(talk)
        assert DEFAULT.decode([t for t, target in zip(tokens, targets, strict=True) if target]) == "".join(said)
        assert f"{header}" in DEFAULT.decode([t for t, target in zip(tokens, targets, strict=True) if not target])
    as_text = [{"function": {"name": "add", "arguments": '{"a": 1}'}}]
    assert llama3.encode([talk[0], {"role": "assistant", "tool_calls": as_text}]) == llama3.encode(talk[:2])


def test_the_completion_of_a_prompt_and_the_end_of_text_are_targets(char_tokenizer, llama3):
    chat = load_chat_format("llama2", char_tokenizer)
    assert shown(chat.encode_document({"prompt": "a ", "completion": "dog"})[0], char_tokenizer) == [
        *["<s>", "▁", "a", "▁", "+d", "+o", "+g", "+</s>"],
    ]
    assert shown(chat.encode_completion("", "dog"), char_tokenizer) == [
        "<s>",
        "+▁",
        "+d",
        "+o",
        "+g",
        "+</s>",
    ]
    assert shown(llama3.encode_completion("I is", ".")) == [
        "<|begin_of_text|>",
        "I",
        " is",
        "+.",
        "+<|end_of_text|>",
    ]


def test_answers_in_a_prompt_of_messages_are_not_targets(llama3):
    (tokens, targets), _ = llama3.encode_document({"prompt": TALK[:4], "completion": TALK[4:]})
    assert tokens == llama3.encode(TALK)[0]
    assert DEFAULT.decode([t for t, target in zip(tokens, targets, strict=True) if target]) == "Yes<|eot_id|>"


def reason_of(chat, document) -> str:
    with pytest.raises((MalformedConversation, TemplateFailure)) as failure:
        chat.encode_document(document)
    return str(failure.value)


def test_a_document_without_targets_yields_a_reason(llama3, char_tokenizer):
    tools = {"messages": TALK, "tools": [{"name": "f"}]}
    assert reason_of(llama3, tools) == "the template does not support tools"
    two = {"messages": [TALK[1], TALK[1], TALK[2]]}
    assert reason_of(load_chat_format("llama2", char_tokenizer), two) == (
        "Llama 2 expects an optional system message, then user and assistant in turn, without tools"
    )
    calls = {"role": "assistant", "content": "I call.", "tool_calls": [{"name": "f", "arguments": {}}]}
    assert reason_of(llama3, {"messages": [TALK[1], calls]}) == (
        "Llama 3 supports one tool call per turn, without text"
    )


def test_a_question_at_the_end_is_not_a_target(llama3):
    tokens, targets = llama3.encode(TALK[:4])
    assert tokens[: len(llama3.encode(TALK[:3])[0])] == llama3.encode(TALK[:3])[0]
    assert sum(targets) == sum(llama3.encode(TALK[:3])[1])


# ---------------------------------------------------------------- unusual templates


def test_a_template_can_add_a_default_system_message_and_the_date():
    template = (
        "{{ bos_token }}{% if messages[0].role != 'system' %}Today {{ strftime_now('%d %b %Y') }}<|eot_id|>{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = ChatFormat.compile(template, DEFAULT)
    chat.validate_template()
    assert DEFAULT.decode(chat.prompt(TALK[1:2])) == (
        "<|begin_of_text|>Today 26 Jul 2024<|eot_id|>user: Who?<|eot_id|>assistant: "
    )
    assert DEFAULT.decode(chat.prompt(TALK[:2])) == (
        "<|begin_of_text|>system: Be kind.<|eot_id|>user: Who?<|eot_id|>assistant: "
    )


# Like Qwen 3's template: only the last answer keeps its reasoning.
REWRITING = (
    "{% for m in messages %}{{ m.role }}<|end_header_id|>"
    "{{ '(thinks)' if m.role == 'assistant' and loop.last }}{{ m.content }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}assistant<|end_header_id|>{% endif %}"
)


def test_the_answers_of_a_template_that_rewrites_earlier_turns_are_targets_as_it_writes_them():
    chat = ChatFormat.compile(REWRITING, DEFAULT)
    chat.validate_template()
    assert chat.rewrites_turns
    tokens, targets = chat.encode(TALK[1:])
    assert DEFAULT.decode([t for t, target in zip(tokens, targets, strict=True) if target]) == (
        "I am.<|eot_id|>(thinks) Yes<|eot_id|>"
    )
    _, later = chat.encode(TALK[1:], loss_mask=[False, False, False, True])
    assert sum(later) < sum(targets) and later[-1]
    assert DEFAULT.decode(chat.prompt(TALK[1:4])) == (
        "user<|end_header_id|> Who? <|eot_id|>assistant<|end_header_id|>I am.<|eot_id|>"
        "user<|end_header_id|>So?<|eot_id|>assistant<|end_header_id|>"
    )


REJECTED = [
    ("{% if %}", "line 1: Expected an expression, got 'end of statement block'"),
    ("{{ messages[9].content }}", "list object has no element 9"),
    (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "the template ends an answer without a special token, so generation would never stop",
    ),
    (
        "{{ messages[0].content }}<|eot_id|>",
        "the template ends an answer without a special token, so generation would never stop",
    ),
    (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        "the template writes <|im_start|>, <|im_end|>, which the tokenizer does not have; set data.chat_template to one whose "
        "special tokens it has (llama3, llama3.1), or set tokenizer.reuse_reserved_tokens = "
        '{ "<|im_start|>" = "<|reserved_special_token_0|>", "<|im_end|>" = "<|reserved_special_token_1|>" } to add them',
    ),
]


@pytest.mark.parametrize(("template", "message"), REJECTED, ids=range(len(REJECTED)))
def test_templates_that_cannot_render_a_conversation_are_rejected(template, message):
    with pytest.raises(ConfigError) as error:
        ChatFormat.compile(template, DEFAULT)
    assert str(error.value) == f"data.chat_template: {message}"


HEADER = "{% for m in messages %}{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
NO_TAIL = (
    "{% for m in messages %}{{ 'A:' + m.content + '<|eot_id|>' if m.role == 'assistant' else m.content }}{% endfor %}"
    "{% if add_generation_prompt %}(thinks){% endif %}"
)
CORRECT = "let a copy of the template write the same text before an answer and for add_generation_prompt"
NOT_FOR_TRAINING = [
    (
        HEADER,
        "the template writes 'assistant<|end_header_id|>' before an answer, but nothing when add_generation_prompt is set; "
        f"{CORRECT}",
    ),
    (
        "{% generation %}" + HEADER + "{% endgeneration %}",
        "the template writes 'assistant<|end_header_id|>' before an answer, but nothing when add_generation_prompt is set; "
        f"{CORRECT}",
    ),
    (
        HEADER + "{% if add_generation_prompt %}(thinks){% endif %}",
        "the template writes 'assistant<|end_header_id|>' before an answer, but something else when add_generation_prompt is "
        f"set; {CORRECT}",
    ),
    (
        NO_TAIL,
        f"the template begins message 2 otherwise than the prompt for it; {CORRECT}",
    ),
    (
        HEADER.replace("<|eot_id|>", "{{ '<|eot_id|>' if messages | length < 3 or m.role == 'user' or not loop.last }}")
        + "{% if add_generation_prompt %}assistant<|end_header_id|>{% endif %}",
        "the template ends an answer without a special token, so generation would never stop",
    ),
]


@pytest.mark.parametrize(("template", "message"), NOT_FOR_TRAINING, ids=range(len(NOT_FOR_TRAINING)))
def test_templates_whose_training_inputs_differ_from_prompts_are_rejected(template, message):
    chat = ChatFormat.compile(template, DEFAULT)
    with pytest.raises(ConfigError) as error:
        chat.validate_template()
    assert str(error.value) == f"data.chat_template: {message}"


def test_a_missing_special_token_that_only_some_conversations_use_is_an_error():
    chat = ChatFormat.compile(
        "{% for m in messages %}{{ '<|tool|>' if m.role == 'tool' }}{{ m.content }}<|eot_id|>{% endfor %}", DEFAULT
    )
    with pytest.raises(TemplateFailure, match=r"^the template writes <\|tool\|>, which the tokenizer does not have; "):
        chat.encode([{"role": "tool", "content": "1"}, TALK[2]])


def test_a_tokenizer_that_parses_special_tokens_in_text_is_an_error(llama3):
    class Parsing(type(DEFAULT)):
        def __init__(self):
            self.__dict__ = DEFAULT.__dict__

        def encode(self, text):
            return [self.special_tokens["<|eot_id|>"]] if text == "<|eot_id|>" else DEFAULT.encode(text)

    chat = load_chat_format("llama3", Parsing())
    document = {"messages": [TALK[1], {"role": "assistant", "content": "<|eot_id|>"}]}
    assert reason_of(chat, document) == "the tokenizer encodes plain text as a special token"


# ---------------------------------------------------------------- the way out


def refusal(template: str, tokenizer=CHATML) -> str:
    with pytest.raises(ConfigError) as error:
        ChatFormat.compile(template, tokenizer).validate_template()
    return error.value.message


@pytest.mark.parametrize(
    ("shipped", "template"),
    [
        ("chatml", HEADER.replace("<|end_header_id|>", "<|im_start|>").replace("<|eot_id|>", "<|im_end|>")),
        ("llama3", HEADER.replace("{{ m.role }}", "<|start_header_id|>{{ m.role }}")),
        ("llama2", "[INST][/INST]" + HEADER.replace("<|eot_id|>", "{{ eos_token }}").replace("<|end_header_id|>", ":")),
    ],
)
def test_a_refused_template_names_the_shipped_template_with_the_same_special_tokens(char_tokenizer, shipped, template):
    fitting = f'set data.chat_template = "{shipped}", which has the same special tokens'
    tokenizer = char_tokenizer if shipped == "llama2" else CHATML
    reason, _, way_out = refusal(template, tokenizer).partition("; ")
    assert reason.endswith("before an answer, but nothing when add_generation_prompt is set")
    assert way_out == f"{fitting}, or {CORRECT}"
    load_chat_format(shipped, tokenizer).validate_template()
    without_end = template.replace("<|im_end|>", "{{ '<|im_end|>' if false }}")
    without_end = without_end.replace("<|eot_id|>", "{{ '<|eot_id|>' if false }}").replace("{{ eos_token }}", "")
    assert refusal(without_end, tokenizer) == (
        f"the template ends an answer without a special token, so generation would never stop; {fitting}"
    )
    failing = "{{ raise_exception('no') }}" + template
    assert refusal(failing, tokenizer) == f"no; {fitting}"


def test_a_refused_template_with_other_special_tokens_names_no_shipped_template():
    other = HEADER.replace("<|end_header_id|>", ":").replace("<|eot_id|>", "{{ eos_token }}")
    assert refusal(other).endswith(f"but nothing when add_generation_prompt is set; {CORRECT}")
    assert reason_of(ChatFormat.compile(NO_TAIL, DEFAULT), {"messages": TALK[1:]}).endswith(f"; {CORRECT}")
