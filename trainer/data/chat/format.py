"""Conversations -> tokens, and which of them the model is to say.

A template writes a conversation as text. What it writes itself may name special tokens; what stands in a message is text,
whatever it looks like. Tokens are cut where the assistant begins to speak, for that is how it will meet them: first the
prompt, then, token by token, its own words.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainer.config import ConfigError
from trainer.data.chat.conversations import Message, PromptCompletion, parse_conversation
from trainer.data.chat.template import BEGIN_MARK, END_MARK, ChatTemplate, TemplateFailure
from trainer.data.chat.template_files import SETTING, read_template
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.data.tokenizer.special_tokens import SpecialNames, missing_special_tokens, reserved_names

TODAY = datetime(2024, 7, 26)
"""What templates are told in training (Llama 3.1 has this date as its own default), lest the tokens change with the day."""

_VERSION = 1
"""Of this way of encoding."""
_ANSWER = "An answer."
_QUESTION = {"role": "user", "content": "A question?"}
_PROBE = [_QUESTION, {"role": "assistant", "content": _ANSWER}] * 2
_ANCHOR = "\ue000"  # in no vocabulary, so it is a token, or some, of its own

TokensAndMask = tuple[list[int], list[bool]]
"""Tokens, and for each whether it is to be learned."""


@dataclass(frozen=True)
class _Rendered:
    text: str
    turns: list[tuple[int, int]]
    """Where the assistant speaks, in characters of the text."""
    joint: str
    """See SpecialNames."""


class ChatFormat:
    """How one template and one tokenizer write conversations.

    end_of_turn: the tokens at which an answer has ended.
    fingerprint: changes when any conversation could be encoded differently.
    """

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        *,
        names: Mapping[str, str] | None = None,
        allowed_special: Collection[str] = (),
        today: datetime = TODAY,
    ):
        """template: Jinja text. names: what the template knows as bos_token, eos_token, ...; else the tokenizer's own.
        allowed_special: names that mean their token in a message too.

        Raises ConfigError where the template is none, needs tokens that are not there, or never ends a turn.
        """
        special = tokenizer.special_tokens
        written = {token: name for name, token in special.items()}
        own = {"bos_token": written.get(tokenizer.bos, ""), "eos_token": written.get(tokenizer.eos, "")}
        self.tokenizer = tokenizer
        self.template = template
        self._names = own if names is None else dict(names)
        self._special = {name: token for name, token in special.items() if len(name) > 1}  # a letter is a letter
        self._special_ids = frozenset(self._special.values())
        for name in allowed_special:
            if name not in self._special:
                raise ConfigError("data.allowed_special", f"the tokenizer has no special token {name}")
        self._special_names = SpecialNames({*self._special, *self._names.values()}, allowed_special)
        # Sentencepiece puts a space before every text, so that a word is the same token wherever it stands.
        anchor = tokenizer.encode(_ANCHOR)
        self._adds_space = all(tokenizer.encode(_ANCHOR + c) != anchor + tokenizer.encode(c) for c in "aT1(")
        try:
            self._template = ChatTemplate(template, today)
            self.end_of_turn = self._find_end_of_turn()
        except TemplateFailure as failure:
            raise ConfigError(SETTING, str(failure)) from None
        shape = [_VERSION, template, self._names, self._special, sorted(allowed_special), tokenizer.fingerprint]
        if self._template.asks_for_date:
            shape.append(today.isoformat())
        self.fingerprint = "chat-" + hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]

    def self_contained(self) -> str:
        """The template with the names of its tokens in it, wherever it is read."""
        names = "".join(f"{{% set {name} = {json.dumps(token)} %}}" for name, token in sorted(self._names.items()))
        return f'{names}{{{{ "" }}}}{self.template}'

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping] | None = None, trained: Sequence[bool] | None = None
    ) -> TokensAndMask:
        """A whole conversation. trained: (messages,), which of the assistant's are to be learned; else all.

        Raises TemplateFailure where the template cannot write it, or leaves open what the assistant said.
        """
        rendered = self._render(messages, tools, answer_next=False, strict=True)
        speaking = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = [True] * len(rendered.turns)
        if trained is not None and not all(trained[i] for i in speaking):
            if len(speaking) != len(chosen):
                raise TemplateFailure("the template's {% generation %} blocks are not one for each answer")
            chosen = [trained[i] for i in speaking]
        return self._tokens(rendered, chosen)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping] | None = None) -> list[int]:
        """Tokens up to where the assistant speaks next. Raises TemplateFailure where the template cannot write them."""
        rendered = self._render(messages, tools, answer_next=True, strict=False)
        return self._tokens(rendered, [False] * len(rendered.turns))[0]

    def encode_pair(self, pair: PromptCompletion) -> TokensAndMask:
        """Without the template: begin of text, prompt; completion and end of text are to be learned."""
        prompt = [self.tokenizer.bos, *self._text(pair.prompt, opens=True)]
        completion = [*self._text(pair.completion, opens=not pair.prompt), self.tokenizer.eos]
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)

    def encode_document(self, document: Any) -> TokensAndMask | str:
        """One JSON value of any kind that parse_conversation reads, or why it cannot be learned from."""
        found = parse_conversation(document)
        if isinstance(found, str):
            return found
        try:
            if isinstance(found, PromptCompletion):
                return self.encode_pair(found)
            tokens, targets = self.encode(found.messages, found.tools, found.trained)
        except TemplateFailure as failure:
            return str(failure)
        return (tokens, targets) if any(targets) else "the template marks nothing that is to be learned"

    def validate_template(self) -> None:
        """Raises ConfigError where to learn what the template writes would not be to answer: where it writes earlier turns
        anew, or the assistant's header only once the answer is there."""
        try:
            rendered = self._render(_PROBE, None, answer_next=False, strict=True)
            tokens, targets = self._tokens(rendered, [True] * len(rendered.turns))
            if not self._template.marks_answers:
                self._check_header(rendered)
        except TemplateFailure as failure:
            raise ConfigError(SETTING, str(failure)) from None
        said = "".join(rendered.text[start:stop] for start, stop in rendered.turns)
        ends = [
            t
            for t, is_target, next_is in zip(tokens, targets, [*targets[1:], False], strict=True)
            if is_target > next_is
        ]
        if said.count(_ANSWER) != 2 or said.count(_QUESTION["content"]) or not set(ends) <= set(self.end_of_turn):
            rule = "the template's {% generation %} blocks do not hold the answers, each with its end-of-turn token"
            raise ConfigError(SETTING, rule)

    # ---------------------------------------------------------------- text

    def _write(
        self, messages: Sequence[Message], tools: Any, answer_next: bool, marks: Sequence[str] = ("", "")
    ) -> str:
        variables = {
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": answer_next,
        }
        return self._template.render({**self._names, **variables, BEGIN_MARK: marks[0], END_MARK: marks[1]})

    def _render(self, messages: Sequence[Message], tools: Any, answer_next: bool, strict: bool) -> _Rendered:
        """strict: every turn of the assistant must be found."""
        if tools and not self._template.takes_tools:
            raise TemplateFailure("the template has no place for tools")
        begin, end, joint = _characters_not_in(self.template, messages, tools)
        messages, tools = self._special_names.parted([messages, tools or None], joint)
        if self._template.marks_answers:
            return _Rendered(
                *_without_marks(self._write(messages, tools, answer_next, (begin, end)), begin, end), joint
            )
        text = self._write(messages, tools, answer_next)
        turns = []
        for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            before = self._write(messages[:i], tools, True)
            after = self._write(messages[: i + 1], tools, False)
            if after.startswith(before) and text.startswith(after):
                turns.append((len(before), len(after)))
            elif strict:
                raise TemplateFailure(
                    f"the template writes message {i + 1} in another way when it is asked for or followed by others; put "
                    "{% generation %} ... {% endgeneration %} around what the assistant says in a copy of it"
                )
        return _Rendered(text, turns, joint)

    # ---------------------------------------------------------------- tokens

    def _tokens(self, rendered: _Rendered, chosen: Sequence[bool]) -> TokensAndMask:
        """chosen: (turns,), which of them are to be learned."""
        tokens: list[int] = []
        targets: list[bool] = []
        at = 0
        for (start, stop), learn in zip(rendered.turns, chosen, strict=True):
            self._extend(tokens, rendered.text[at:start], rendered.joint)
            targets += [False] * (len(tokens) - len(targets))
            at = self._end_of_turn(rendered.text, start, stop)
            self._extend(tokens, rendered.text[start:at], rendered.joint)
            targets += [learn] * (len(tokens) - len(targets))
        self._extend(tokens, rendered.text[at:], rendered.joint)
        return tokens, targets + [False] * (len(tokens) - len(targets))

    def _end_of_turn(self, text: str, start: int, stop: int) -> int:
        """Where the turn [start, stop) ends by a special token: its last one, or, in a marked turn, the one behind it."""
        pieces = list(self._special_names.pieces(text[start:stop]))
        tail = pieces.pop()[0] if pieces and not pieces[-1][1] else ""
        if pieces and not tail.strip():
            return stop - len(tail)  # as the line end that ChatML puts behind: nobody waits for it
        if not self._template.marks_answers:
            raise TemplateFailure("the template ends an answer without a special token, so that it would never end")
        behind = next(self._special_names.pieces(text[stop:]), ("", False))
        return stop + len(behind[0]) if behind[1] else stop

    def _extend(self, tokens: list[int], text: str, joint: str) -> None:
        """Append the tokens of a text, whose joints are not of it."""
        for piece, is_special in self._special_names.pieces(text):
            if is_special:
                if piece not in self._special:
                    raise TemplateFailure(self._lacks([piece]))
                tokens.append(self._special[piece])
            else:
                plain = piece.replace(joint, "").replace(ascii(joint)[1:-1], "")  # or as JSON writes it in ASCII
                tokens += self._text(plain, opens=not tokens or tokens[-1] in (self.tokenizer.bos, self.tokenizer.eos))

    def _text(self, text: str, opens: bool) -> list[int]:
        """Tokens of plain text. opens: whether it stands where a text begins; elsewhere no space comes before it."""
        tokens = self.tokenizer.encode(text)
        if self._adds_space and not opens:
            anchor, anchored = self.tokenizer.encode(_ANCHOR), self.tokenizer.encode(_ANCHOR + text)
            if anchored[: len(anchor)] == anchor:
                tokens = anchored[len(anchor) :]
        if not self._special_ids.isdisjoint(tokens):
            raise TemplateFailure("the tokenizer reads a special token in plain text")
        return tokens

    # ---------------------------------------------------------------- what a template does

    def _find_end_of_turn(self) -> tuple[int, ...]:
        """Raises TemplateFailure where a template cannot write the simplest conversation, or does not end it."""
        written = self._write(_PROBE[:2], None, answer_next=False)
        special = [name for name, is_special in self._special_names.pieces(written) if is_special]
        lacking = [name for name in special if name not in self._special]
        if lacking:
            raise TemplateFailure(self._lacks([*lacking, *missing_special_tokens(self.template, self._special)]))
        behind = self._special_names.pieces(written.rpartition(_ANSWER)[2])
        ends = [self._special[name] for name, is_special in behind if is_special]
        if _ANSWER not in written or not ends:
            raise TemplateFailure("the template ends an answer without a special token, so that it would never end")
        return (ends[0],)

    def _check_header(self, rendered: _Rendered) -> None:
        asked, plain = (self._write([_QUESTION], None, answer_next) for answer_next in (True, False))
        start, stop = rendered.turns[0]
        header = rendered.text[start:stop].partition(_ANSWER)[0]
        if plain == asked and header.strip():
            raise TemplateFailure(
                f"the template writes {header!r} before an answer, but not when add_generation_prompt asks"
            )

    def _lacks(self, names: Sequence[str]) -> str:
        names = list(dict.fromkeys(names))
        rule = f"the template writes {', '.join(names)}, which the tokenizer does not have"
        free = reserved_names(self._special)[: len(names)]
        pairs = ", ".join(f'"{name}" = "{reserved}"' for name, reserved in zip(names, free, strict=False))
        return (
            f"{rule}; tokenizer.reuse_reserved_tokens = {{ {pairs} }} would give ids"
            if len(free) == len(names)
            else rule
        )


def _characters_not_in(*values: Any) -> list[str]:
    """Three private-use characters that stand nowhere in these values, nor as JSON's escapes."""
    used = json.dumps(values, ensure_ascii=False, default=str).lower()
    free = (chr(c) for c in range(0xE001, 0xF900) if chr(c) not in used and f"\\u{c:04x}" not in used)
    found = [c for c, _ in zip(free, range(3), strict=False)]
    if len(found) < 3:
        raise TemplateFailure("every private-use character stands in the conversation")
    return found


def _without_marks(written: str, begin: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and where they stood."""
    text = ""
    turns = []
    for i, part in enumerate(written.split(begin)):
        inside, found, rest = part.partition(end)
        if i and (not found or end in rest):
            raise TemplateFailure("the template has a {% generation %} block inside another")
        if i and inside:
            turns.append((len(text), len(text) + len(inside)))
        text += inside + rest
    return text, turns


def load_chat_format(
    choice: str,
    tokenizer: Tokenizer,
    *,
    allowed_special: Collection[str] = (),
    today: datetime = TODAY,
) -> ChatFormat:
    """choice: see chat_files.read_template.

    Raises ConfigError where the template cannot be read or does not go with the tokenizer.
    """
    text, names = read_template(choice)
    return ChatFormat(text, tokenizer, names=names, allowed_special=allowed_special, today=today)
