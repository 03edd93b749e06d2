"""Chat formats of model families: their templates, the special tokens of their tokenizers, and the flags of these tokens.

Templates with a file name are published ones, from the package trl. Those for training differ from the model's own template by
{% generation %} blocks. The others are written in the style of the family.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import transformers
import trl

from tests.data.chat.examples import DEFAULT
from trainer.config import TokenizerConfig
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.hf_json import SPECIAL_TOKEN_FLAGS, json_bytes

_TRL = Path(trl.__file__).with_name("chat_templates")

_MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {%- if tools and loop.index0 == (1 if messages[0].role == 'system' else 0) %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content if message.content else '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- arguments if arguments is string else arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
_GRANITE = """{%- if messages[0].role == 'system' %}
    {%- set system, loop_messages = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, loop_messages = 'You answer.', messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + ('tool_response' if message.role == 'tool' else message.role) + '<|end_of_role|>' }}
    {%- if message.tool_calls %}
        {{- '<|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson }}
    {%- endif %}
    {{- (message.content or '') + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
{%- endif %}"""


@dataclass(frozen=True)
class Family:
    template: str
    """Name of a shipped template, name of a file of trl, or the text of a template."""
    special: tuple[str, ...]
    """Special tokens of the tokenizer beside BOS and EOS."""
    bos: str | None
    eos: str
    rstrip: bool = False
    """Whether `special` tokens absorb white space after them."""

    @property
    def text(self) -> str:
        if self.template in BUILT_IN:
            return BUILT_IN[self.template].read_text()
        return (_TRL / self.template).read_text() if self.template.endswith(".jinja") else self.template


_IM = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_QWEN = (*_IM, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_TURN = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>")
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>")
_BAR = "\uff5c"  # DeepSeek's names have full-width bars
_DEEPSEEK = (_TRL / "deepseekv3_training.jinja").read_text()


FAMILIES = {
    "llama2": Family("llama2", (), "<s>", "</s>"),
    "llama3": Family("llama3", _LLAMA, "<|begin_of_text|>", "<|end_of_text|>"),
    "chatml": Family("chatml", _IM, "<s>", "</s>"),
    "Llama 3.1": Family("llama3_1.jinja", _LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "Llama 3.2": Family("llama3_2.jinja", _LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "Qwen 2.5": Family("qwen2_5.jinja", _QWEN[:-2], None, "<|im_end|>"),
    "Qwen 3": Family("qwen3_training.jinja", _QWEN, None, "<|im_end|>"),
    "Qwen 3 2507": Family("qwen3_instruct_2507.jinja", _QWEN, None, "<|im_end|>"),
    "Gemma 2": Family("gemma.jinja", _TURN[:2], "<bos>", "<eos>"),
    "Gemma 3": Family("gemma3.jinja", _TURN, "<bos>", "<eos>"),
    "Phi 3": Family("phi3_training.jinja", _PHI, "<s>", "<|endoftext|>", rstrip=True),
    "Mistral": Family(_MISTRAL, tuple(re.findall(r"\[/?[A-Z_]+\]", _MISTRAL)), "<s>", "</s>"),
    "Granite 3": Family(
        _GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), "<|startoftext|>", "<|end_of_text|>"
    ),
    "gpt-oss": Family("gptoss_training.jinja", _HARMONY, "<|startoftext|>", "<|return|>"),
    "DeepSeek V3": Family(
        "deepseekv3_training.jinja",
        tuple(re.findall(f"<{_BAR}[^{_BAR}]+{_BAR}>", _DEEPSEEK)),
        f"<{_BAR}begin\u2581of\u2581sentence{_BAR}>",
        f"<{_BAR}end\u2581of\u2581sentence{_BAR}>",
    ),
}


def write_folder(family: Family, folder: Path) -> None:
    """Write a family's tokenizer and template. The vocabulary is that of the shipped tokenizer."""
    content = json.loads(DEFAULT.huggingface_files()["tokenizer.json"])
    first = len(content["model"]["vocab"])
    names = dict.fromkeys([*filter(None, [family.bos, family.eos]), *family.special])
    flags = {name: SPECIAL_TOKEN_FLAGS | {"rstrip": family.rstrip and name in family.special} for name in names}
    content["added_tokens"] = [{"id": first + i, "content": name, **flags[name]} for i, name in enumerate(names)]
    content["post_processor"] = None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": family.bos, "eos_token": family.eos}
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(json_bytes(content))
    (folder / "tokenizer_config.json").write_bytes(json_bytes(config))
    (folder / "chat_template.jinja").write_text(family.text)


@dataclass(frozen=True)
class Loaded:
    """A family's chat format here, and its tokenizer in transformers."""

    family: Family
    chat: ChatFormat
    peer: transformers.PreTrainedTokenizerBase

    @functools.cached_property
    def name_pattern(self) -> re.Pattern:
        return re.compile("|".join(map(re.escape, sorted(self.chat.tokenizer.special_tokens, key=len, reverse=True))))


def load(name: str, folder: Path) -> Loaded:
    write_folder(FAMILIES[name], folder)
    tokenizer = load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder)))
    chat = load_chat_format(str(folder), tokenizer)
    chat.validate_template()
    return Loaded(FAMILIES[name], chat, transformers.AutoTokenizer.from_pretrained(folder))
