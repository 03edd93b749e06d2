"""Encoding of conversations as tokens and a loss mask, by a chat template and a tokenizer.

A template renders a conversation as text. If the template itself writes the name of a special token, the name is encoded as that
token. In messages, this applies only to the names in data.allowed_special; all other text is encoded as plain text. The prompt
and each answer are tokenized separately, exactly as at inference.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import ConfigError
from trainer.data.chat.conversations import Message, PromptCompletion, parse_conversation
from trainer.data.chat.sandbox import BEGIN_MARK, END_MARK
from trainer.data.chat.template import ChatTemplate, TemplateFailure
from trainer.data.chat.template_files import SETTING, read_template
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.data.tokenizer.special_tokens import SpecialNames, missing_special_tokens, reserved_names

_VERSION = 1
"""Version of the encoding. It is part of the input of ChatFormat.fingerprint."""
_ANSWER = "An answer."
_QUESTION = {"role": "user", "content": "A question?"}
_NO_END_OF_TURN = "the template ends an answer without a special token, so generation would never stop"
_PROBE = [_QUESTION, {"role": "assistant", "content": _ANSWER}] * 2

TokensAndMask = tuple[list[int], list[bool]]
"""Token ids, and for each token whether it is a target."""


@dataclass(frozen=True)
class _Rendered:
    text: str
    turns: list[tuple[int, int]]
    """Half-open range (start, stop) of each answer, as character offsets in the text."""
    separator: str
    """Character that SpecialNames inserts to escape the names of special tokens in messages."""


@dataclass
class _Encoded:
    tokens: list[int] = field(default_factory=list)
    targets: list[bool] = field(default_factory=list)
    parts: list[str | int] = field(default_factory=list)
    """The encoded text: plain texts, and ids of special tokens."""


class ChatFormat:
    """A chat template combined with a tokenizer.

    end_of_turn: ids of the tokens that end an answer.
    fingerprint: text that identifies the encoding. Formats with equal fingerprints encode every conversation equally.
    """

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        *,
        names: Mapping[str, str] | None = None,
        allowed_special: Collection[str] = (),
    ):
        """template: Jinja text. names: text of each template variable such as bos_token (default: the tokenizer's BOS and EOS).
        allowed_special: special tokens that are recognized in messages too.

        Raises ConfigError for a template that is invalid, needs special tokens that the tokenizer does not have, or ends an
        answer without a special token.
        """
        special = tokenizer.special_tokens
        name_of = {token: name for name, token in special.items()}
        default_names = {"bos_token": name_of.get(tokenizer.bos, ""), "eos_token": name_of.get(tokenizer.eos, "")}
        self.tokenizer = tokenizer
        self.template = template
        self._names = default_names if names is None else dict(names)
        self._special = {name: token for name, token in special.items() if len(name) > 1}  # one character is text
        self._special_ids = frozenset(self._special.values())
        for name in allowed_special:
            if name not in self._special:
                raise ConfigError("data.allowed_special", f"the tokenizer has no special token {name}")
        self._special_names = SpecialNames({*self._special, *self._names.values()}, allowed_special)
        try:
            self._template = ChatTemplate(template)
            self.end_of_turn = self._find_end_of_turn()
        except TemplateFailure as failure:
            raise ConfigError(SETTING, str(failure)) from None
        shape = [_VERSION, template, self._names, self._special, sorted(allowed_special), tokenizer.fingerprint]
        if tokenizer.parts_fingerprint:
            shape.append(tokenizer.parts_fingerprint)
        self.fingerprint = "chat-" + hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]

    def self_contained(self) -> str:
        """Return the template with definitions of bos_token and similar variables, so that it needs no other configuration."""
        names = "".join(f"{{% set {name} = {json.dumps(token)} %}}" for name, token in sorted(self._names.items()))
        return f'{names}{{{{ "" }}}}{self.template}'

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping] | None = None,
        loss_mask: Sequence[bool] | None = None,
    ) -> TokensAndMask:
        """Encode a complete conversation. loss_mask: whether each message is a target, shape (messages,). Default: all answers.

        Raises TemplateFailure if the template cannot render the conversation or an answer cannot be located in the text.
        """
        rendered = self._render(messages, tools, add_generation_prompt=False, strict=True)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        turn_mask = [True] * len(rendered.turns)
        if loss_mask is not None and not all(loss_mask[i] for i in answers):
            if len(answers) != len(turn_mask):
                raise TemplateFailure("the template does not have one {% generation %} block for each answer")
            turn_mask = [loss_mask[i] for i in answers]
        return self._encode_rendered(rendered, turn_mask)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode messages up to the start of the next answer. Raises TemplateFailure if the template cannot render them."""
        rendered = self._render(messages, None, add_generation_prompt=True, strict=False)
        return self._encode_rendered(rendered, [False] * len(rendered.turns))[0]

    def encode_prompt_completion(self, document: PromptCompletion) -> TokensAndMask:
        """Encode a document without the template. The prompt, and BOS if the tokenizer adds it, are not targets. The completion
        and EOS are targets."""
        before = [document.prompt] if document.prompt else []
        prompt = [*self.tokenizer.prefix, *self._encode_parts(before, [])]
        completion = [*self._encode_parts([document.completion], before), self.tokenizer.eos]
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)

    def encode_document(self, document: Any) -> TokensAndMask:
        """Encode a JSON value in any format that parse_conversation accepts. Raises MalformedConversation or TemplateFailure, or
        RecursionError if the value is nested too deeply."""
        parsed = parse_conversation(document)
        if isinstance(parsed, PromptCompletion):
            return self.encode_prompt_completion(parsed)
        tokens, targets = self.encode(parsed.messages, parsed.tools, parsed.loss_mask)
        if not any(targets):
            raise TemplateFailure("the template marks no text as a target")
        return tokens, targets

    def validate_template(self) -> None:
        """Raise ConfigError if training inputs would differ from inference prompts.

        They differ if the template rewrites earlier turns, or emits the assistant's header only together with an answer.
        """
        try:
            rendered = self._render(_PROBE, None, add_generation_prompt=False, strict=True)
            tokens, targets = self._encode_rendered(rendered, [True] * len(rendered.turns))
            if not self._template.has_generation_blocks:
                self._check_header(rendered)
        except TemplateFailure as failure:
            raise ConfigError(SETTING, str(failure)) from None
        answers = "".join(rendered.text[start:stop] for start, stop in rendered.turns)
        following = [*targets[1:], False]
        ends = {token for token, now, later in zip(tokens, targets, following, strict=True) if now and not later}
        if answers.count(_ANSWER) != 2 or answers.count(_QUESTION["content"]) or not ends <= set(self.end_of_turn):
            reason = "must contain each answer with its end-of-turn token"
            raise ConfigError(SETTING, f"the template's {{% generation %}} blocks {reason}")

    # ---------------------------------------------------------------- text

    def _run_template(self, locate: bool = False, **variables: Any) -> tuple[str, list]:
        """Call ChatTemplate.render(), and return the text and the answer ranges."""
        return self._template.render({**self._names, "tools": None, "documents": None, **variables}, locate)

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool, strict: bool) -> _Rendered:
        """Render messages. strict: whether to raise TemplateFailure if an answer cannot be located in the text."""
        if tools and not self._template.uses_tools:
            raise TemplateFailure("the template does not support tools")
        begin, end, separator = _unused_characters(self.template, messages, tools)
        messages, tools = self._special_names.escape([messages, tools or None], separator)
        variables = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        if self._template.has_generation_blocks:
            marked, _ = self._run_template(**variables, **{BEGIN_MARK: begin, END_MARK: end})
            return _Rendered(*_remove_marks(marked, begin, end), separator)
        text, turns = self._run_template(**variables, locate=True)
        if strict and None in turns:
            answers = [i for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
            raise TemplateFailure(
                f"the template renders message {answers[turns.index(None)]} differently in a prompt or in a longer "
                "conversation; mark the answers with {% generation %} ... {% endgeneration %} in a copy of the template"
            )
        return _Rendered(text, [turn for turn in turns if turn], separator)

    # ---------------------------------------------------------------- tokens

    def _encode_rendered(self, rendered: _Rendered, turn_mask: Sequence[bool]) -> TokensAndMask:
        """Encode a rendered text. turn_mask: whether each turn is a target, shape (turns,)."""
        encoded = _Encoded()
        end = 0
        for (start, stop), is_target in zip(rendered.turns, turn_mask, strict=True):
            self._extend(encoded, rendered.text[end:start], rendered.separator, is_target=False)
            end = self._end_of_turn(rendered.text, start, stop)
            self._extend(encoded, rendered.text[start:end], rendered.separator, is_target)
        self._extend(encoded, rendered.text[end:], rendered.separator, is_target=False)
        return encoded.tokens, encoded.targets

    def _end_of_turn(self, text: str, start: int, stop: int) -> int:
        """Return the offset after the special token that ends the turn in text[start:stop]. If the template has generation
        blocks, this token may begin at `stop`."""
        pieces = list(self._special_names.pieces(text[start:stop]))
        tail = pieces.pop()[0] if pieces and not pieces[-1][1] else ""
        if pieces and not tail.strip():
            return stop - len(tail)  # exclude white space after it, such as ChatML's line end: generation stops before
        if not self._template.has_generation_blocks:
            raise TemplateFailure(_NO_END_OF_TURN)
        following, is_special = next(self._special_names.pieces(text[stop:]), ("", False))
        return stop + len(following) if is_special else stop

    def _extend(self, encoded: _Encoded, text: str, separator: str, is_target: bool) -> None:
        """Remove the separators from a text, and append its tokens to `encoded`. is_target: whether they are targets."""
        parts: list[str | int] = []
        for piece, is_special in self._special_names.pieces(text):
            if not is_special:
                plain = piece.replace(separator, "").replace(ascii(separator)[1:-1], "")  # JSON may escape it as ASCII
                parts += [plain] if plain else []
            elif piece in self._special:
                parts.append(self._special[piece])
            else:
                raise self._missing_tokens_error([piece])
        tokens = self._encode_parts(parts, encoded.parts)
        encoded.parts += parts
        encoded.tokens += tokens
        encoded.targets += [is_target] * len(tokens)

    def _encode_parts(self, parts: Sequence[str | int], before: Sequence[str | int]) -> list[int]:
        """Encode plain texts and ids of special tokens. before: the parts that precede."""
        try:
            tokens = self.tokenizer.encode_parts(parts, before)
        except ValueError as error:
            raise TemplateFailure(str(error)) from None
        special = Counter(token for token in tokens if token in self._special_ids)
        if special - Counter(part for part in parts if isinstance(part, int)):
            raise TemplateFailure("the tokenizer encodes plain text as a special token")
        return tokens

    # ---------------------------------------------------------------- checks of a template

    def _find_end_of_turn(self) -> tuple[int, ...]:
        """Return the end-of-turn tokens. Raises TemplateFailure if the template fails or writes no such token."""
        text, _ = self._run_template(messages=_PROBE[:2], add_generation_prompt=False)
        special = [name for name, is_special in self._special_names.pieces(text) if is_special]
        missing = [name for name in special if name not in self._special]
        if missing:
            raise self._missing_tokens_error([*missing, *missing_special_tokens(self.template, self._special)])
        following = self._special_names.pieces(text.rpartition(_ANSWER)[2])
        ends = [self._special[name] for name, is_special in following if is_special]
        if _ANSWER not in text or not ends:
            raise TemplateFailure(_NO_END_OF_TURN)
        return (ends[0],)

    def _check_header(self, rendered: _Rendered) -> None:
        with_prompt, without = (
            self._run_template(messages=[_QUESTION], add_generation_prompt=prompt)[0] for prompt in (True, False)
        )
        start, stop = rendered.turns[0]
        header = rendered.text[start:stop].partition(_ANSWER)[0]
        if with_prompt == without and header.strip():
            reason = "before an answer, but not when add_generation_prompt is set"
            raise TemplateFailure(f"the template writes {header!r} {reason}")

    def _missing_tokens_error(self, names: Sequence[str]) -> TemplateFailure:
        names = list(dict.fromkeys(names))
        message = f"the template writes {', '.join(names)}, which the tokenizer does not have"
        reserved = reserved_names(self._special)[: len(names)]
        if len(reserved) == len(names):
            pairs = ", ".join(f'"{name}" = "{token}"' for name, token in zip(names, reserved, strict=True))
            message += f"; set tokenizer.reuse_reserved_tokens = {{ {pairs} }} to add them"
        return TemplateFailure(message)


def _unused_characters(*values: Any) -> list[str]:
    """Return three private-use characters that occur in none of the values, neither directly nor as JSON escapes."""
    used = json.dumps(values, ensure_ascii=False, default=str).lower()
    unused = (chr(c) for c in range(0xE001, 0xF900) if chr(c) not in used and f"\\u{c:04x}" not in used)
    characters = list(itertools.islice(unused, 3))
    if len(characters) < 3:
        raise TemplateFailure("the conversation uses every private-use character")
    return characters


def _remove_marks(marked: str, begin: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without marks, and the (start, stop) of each marked range in the returned text."""
    text, turns = "", []
    for i, piece in enumerate(marked.split(begin)):
        inside, mark, outside = piece.partition(end)
        if i and (not mark or end in outside):
            raise TemplateFailure("the template nests {% generation %} blocks")
        if i and inside:
            turns.append((len(text), len(text) + len(inside)))
        text += inside + outside
    return text, turns


def load_chat_format(choice: str, tokenizer: Tokenizer, *, allowed_special: Collection[str] = ()) -> ChatFormat:
    """Load a chat format. choice: see read_template. Raises ConfigError if the template cannot be read or used."""
    text, names = read_template(choice)
    return ChatFormat(text, tokenizer, names=names, allowed_special=allowed_special)
