"""Answers found by origins and by the earlier ways (blocks, prefixes, shipped templates with blocks) have the same targets."""

import json
import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

from tests.conftest import ROOT
from tests.data.chat.examples import CHATML, DEFAULT
from tests.data.chat.families import FAMILIES, OTHERS, load
from tests.data.chat.shapes import EOT, SHAPES
from tests.data.chat.test_corpus import with_name
from trainer.data.chat.conversations import MalformedConversation, parse_conversation
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template import TemplateFailure
from trainer.data.chat.template_files import BUILT_IN


def differences(chat: ChatFormat, document, name: str) -> list[str]:
    """Return a line per answer whose earlier targets differ from its new range."""
    found = {}
    render = chat._render_complete

    def recorded(messages, tools, arguments, loss_mask):
        try:
            result = render(messages, tools, arguments, loss_mask)
        except TemplateFailure as failure:
            found["old"] = str(failure)
            raise
        found["old"] = result
        return result

    locate = chat._locate

    def located(rendering, data, with_prompt):
        found["rendering"], found["new"] = rendering, chat._find(rendering, data)
        return locate(rendering, data, with_prompt)

    chat._render_complete, chat._locate = recorded, located
    try:
        chat.encode_document(document)
    except (MalformedConversation, TemplateFailure) as failure:
        found.setdefault("old", str(failure))
        found["refused"] = str(failure)
    finally:
        del chat._render_complete, chat._locate
    if "new" not in found:
        return []  # refused before answers are located
    text, new = found["rendering"].text, list(found["new"].values())
    if isinstance(found["old"], str):
        return [f"{name}: refused before ({found['old']}), now {[t and text[slice(*t)] for t in new]}"]
    rendering, turns, *_ = found["old"]
    if len(turns) != len(new):
        return [f"{name}: {len(turns)} before, {len(new)} now"]
    lines = []
    for before, now in zip(turns, new, strict=True):
        try:
            before = before[0], chat._encoder._end_of_turn(rendering, *before, chat._template.has_generation_blocks)
        except TemplateFailure as failure:
            before = str(failure)
        if before != now:
            shown = [t if t is None or isinstance(t, str) else text[slice(*t)] for t in (before, now)]
            lines.append(f"{name}: {shown[0]!r} before, {shown[1]!r} now")
    return lines


PUBLISHED = {
    "gpt-oss": ("<|start|>assistant",),
    "DeepSeek V3": ("<\uff5cAssistant\uff5c>", "<\uff5ctool\u2581outputs\u2581end\uff5c>"),
}
SHIPPED = {"qwen2.5": ("\n",)}
"""Template -> beginnings of answers that the blocks include. At inference the prompt ends with them, so they are no targets."""
NO_LONGER_REFUSED = ("an answer at the beginning: ", "two answers in a row: ")
"""Conversations in which the prompt alone cannot be rendered, or differs, but whose answers have the same header as all others."""


def unexplained(lines: list[str], prompt_ends: tuple[str, ...]) -> list[str]:
    """Return the differences but those for a known reason."""
    pairs = [re.fullmatch(r".*: '(.*)' before, '(.*)' now", line) for line in lines]
    allowed = {repr(end)[1:-1] for end in prompt_ends}
    return [
        line
        for line, pair in zip(lines, pairs, strict=True)
        if not (pair and pair[1].removesuffix(pair[2]) in allowed)
        and not (line.startswith(NO_LONGER_REFUSED) and "refused before" in line and "None" not in line)
    ]


@pytest.mark.parametrize("name", FAMILIES | OTHERS)
def test_published_templates(name, tmp_path):
    chat = load(name, tmp_path / "family").chat
    end = chat.tokenizer.decode(chat.end_of_turn[:1])
    lines = [
        line for shape, value in SHAPES.items() for line in differences(chat, with_name(value.document, end), shape)
    ]
    assert unexplained(lines, PUBLISHED.get(name, ())) == []


OF = {"llama2": "llama2", "llama3": "llama3", "chatml": "chatml", "llama3.1": "Llama 3.1", "qwen2.5": "Qwen 2.5",
      "qwen3": "Qwen 3", "mistral-v0.3": "Mistral v0.3", "mistral-nemo": "Mistral Nemo", "ministral3": "Ministral 3",
      "smollm3": "SmolLM 3", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "granite3": "Granite 3", "gemma2": "Gemma 2",
      "gemma3": "Gemma 3", "phi3": "Phi 3", "phi4": "Phi 4", "phi4-mini": "Phi 4 mini"}  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_shipped_templates(name, tmp_path):
    tokenizer = load(OF[name], tmp_path / "family").chat.tokenizer
    chat = load_chat_format(name, tokenizer)
    end = tokenizer.decode(chat.end_of_turn[:1])
    lines = [
        line for shape, value in SHAPES.items() for line in differences(chat, with_name(value.document, end), shape)
    ]
    with (ROOT / "trainer/data/chat/chats.jsonl").open() as file:
        for line in list(file)[:: 1 if name in ("llama3", "qwen3") else 10]:
            lines += differences(chat, json.loads(line), "chats.jsonl")
    assert unexplained(lines, SHIPPED.get(name, ())) == []
