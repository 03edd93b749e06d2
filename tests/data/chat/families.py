"""Chat formats of model families: their templates, the special tokens of their tokenizers, and the flags of these tokens.

Templates with a file name are published ones, from the package trl. Those for training differ from the model's own template by
{% generation %} blocks. The others are written in the style of the family (published.py).
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import transformers
import trl

from tests.data.chat import published
from tests.data.chat.examples import DEFAULT
from trainer.base.config import TokenizerConfig
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.hf_json import SPECIAL_TOKEN_FLAGS, json_bytes

_TRL = Path(trl.__file__).with_name("chat_templates")


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
    answers: str = ""
    """Pattern of an answer with its end of turn, if prefixes of the conversation do not show it. Its group is the targets."""

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
_DEEPSEEK = (
    tuple(re.findall(f"<{_BAR}[^{_BAR}]+{_BAR}>", (_TRL / "deepseekv3.jinja").read_text())),
    f"<{_BAR}begin\u2581of\u2581sentence{_BAR}>",
    f"<{_BAR}end\u2581of\u2581sentence{_BAR}>",
)
"""Special tokens, and those at the beginning and at the end of a text."""


_INSTRUCT = tuple(dict.fromkeys(re.findall(r"\[/?[A-Z_]+\]", published.MISTRAL_7B + published.MINISTRAL)))
_SEP = ("<|im_start|>", "<|im_sep|>", "<|im_end|>")
_IM_ANSWERS = r"<\|im_start\|>assistant\n((?:(?!<\|im_start\|>).)*(?:<\|im_end\|>|<\|endoftext\|>))"
_AT_ONCE = r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n)?((?:(?!<\|im_start\|>).)*<\|im_end\|>)"
_PHI_ANSWERS = r"<\|assistant\|>\n(.*?<\|end\|>)"
_PHI_MINI_ANSWERS = r"<\|assistant\|>(.*?<\|end\|>)"
_INST_ANSWERS = r"(?:(?<=\[/INST\])|(?<=\[/TOOL_RESULTS\])|(?<=s>))((?!\[(?:INST|TOOL_RES|AVAIL)).+?</s>)"

_OLMO2_ANSWERS = r"<\|assistant\|>\n(.*?<\|endoftext\|>)"
_HARMONY_ANSWERS = (
    r"<\|start\|>assistant((?:<\|channel\|>analysis.*?<\|end\|><\|start\|>assistant)?"
    r".*?(?:<\|end\|>|<\|return\|>|<\|call\|>))"
)
_DEEPSEEK_ANSWERS = (
    f"(?:<{_BAR}Assistant{_BAR}>|<{_BAR}tool\u2581outputs\u2581end{_BAR}>)(.+?<{_BAR}end\u2581of\u2581sentence{_BAR}>)"
)
_CALL_END, _OUTPUTS = f"<{_BAR}tool\u2581call\u2581end{_BAR}>", f"<{_BAR}tool\u2581outputs\u2581begin{_BAR}>"
# This template writes nothing else after a single call.
_R1_ANSWERS = _DEEPSEEK_ANSWERS.replace("(.+?", f"(.+?(?:{_CALL_END}(?={_OUTPUTS})|")[:-1] + "))"

FAMILIES = {
    "llama2": Family("llama2", (), "<s>", "</s>"),
    "llama3": Family("llama3", _LLAMA, "<|begin_of_text|>", "<|end_of_text|>"),
    "chatml": Family("chatml", _IM, "<s>", "</s>"),
    "Llama 3.1": Family("llama3_1.jinja", _LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "Llama 3.2": Family("llama3_2.jinja", _LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "Qwen 2.5": Family("qwen2_5.jinja", _QWEN[:-2], None, "<|im_end|>"),
    "Qwen 3": Family("qwen3.jinja", _QWEN, None, "<|im_end|>", answers=_IM_ANSWERS),
    "Qwen 3 2507": Family("qwen3_instruct_2507.jinja", _QWEN, None, "<|im_end|>"),
    "Gemma 2": Family("gemma.jinja", _TURN[:2], "<bos>", "<eos>"),
    "Gemma 3": Family("gemma3.jinja", _TURN, "<bos>", "<eos>"),
    "Phi 3": Family("phi3.jinja", _PHI, "<s>", "<|endoftext|>", rstrip=True, answers=_PHI_ANSWERS),
    "Phi 4 mini": Family(
        published.PHI4_MINI, (*_PHI, "<|tool|>", "<|/tool|>"), None, "<|endoftext|>", answers=_PHI_MINI_ANSWERS
    ),
    "Mistral v0.3": Family(published.MISTRAL_7B, _INSTRUCT, "<s>", "</s>", answers=_INST_ANSWERS),
    "Ministral 3": Family(published.MINISTRAL, _INSTRUCT, "<s>", "</s>"),
    "SmolLM 3": Family(published.SMOLLM3, (*_IM, "<think>", "</think>"), None, "<|im_end|>", answers=_AT_ONCE),
    "OLMo 2": Family(published.OLMO2, _IM, "<|endoftext|>", "<|endoftext|>", answers=_OLMO2_ANSWERS),
    "OLMo 3": Family(published.OLMO3, _IM, None, "<|endoftext|>", answers=_IM_ANSWERS),
    "Granite 3": Family(
        published.GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        "<|startoftext|>",
        "<|end_of_text|>",
    ),
    "gpt-oss": Family("gptoss.jinja", _HARMONY, "<|startoftext|>", "<|return|>", answers=_HARMONY_ANSWERS),
    "DeepSeek V3": Family(
        "deepseekv3.jinja",
        *_DEEPSEEK,
        answers=_DEEPSEEK_ANSWERS,
    ),
    "R1 Distill": Family(
        "deepseek_r1_distill.jinja",
        *_DEEPSEEK,
        answers=_R1_ANSWERS,
    ),
}
"""Families whose templates are tried with conversations of all shapes."""
OTHERS = {
    "Llama 2": Family(published.LLAMA2, (), "<s>", "</s>"),
    "Llama 3": Family("llama3.jinja", _LLAMA, "<|begin_of_text|>", "<|end_of_text|>"),
    "Mistral v0.2": Family(published.MISTRAL_V1, (), "<s>", "</s>"),
    "Mistral Nemo": Family(published.NEMO, _INSTRUCT, "<s>", "</s>", answers=_INST_ANSWERS),
    "OLMo 3 Think": Family(
        published.OLMO3_THINK, _IM, None, "<|endoftext|>", answers=_IM_ANSWERS.replace("(", "(?:<think>)?(", 1)
    ),
    "Phi 3, early": Family(published.PHI3_SMALL, _PHI, "<s>", "<|endoftext|>", rstrip=True),
    "Phi 3.5": Family("phi3_5.jinja", _PHI, "<s>", "<|endoftext|>", rstrip=True, answers=_PHI_ANSWERS),
    "Phi 4": Family(published.PHI4, _SEP, "<|endoftext|>", "<|im_end|>"),
    "Phi 4 reasoning": Family(published.PHI4_REASONING, (*_SEP, "<think>", "</think>"), "<|endoftext|>", "<|im_end|>"),
}
"""Other templates of these families."""


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
    family = (FAMILIES | OTHERS)[name]
    write_folder(family, folder)
    tokenizer = load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder)))
    chat = load_chat_format(str(folder), tokenizer)
    chat.validate_template()
    return Loaded(family, chat, transformers.AutoTokenizer.from_pretrained(folder))
