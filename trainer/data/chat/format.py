"""Encoding of conversations as tokens and a loss mask, by a chat template and a tokenizer.

A template renders a conversation as text. If the template itself writes the name of a special token, the name is encoded as that
token. In messages, this applies only to the names in data.allowed_special; all other text is encoded as plain text.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainer.base.config import ConfigError
from trainer.data.chat.answers import QUESTION, Turn, common_start, find_answers
from trainer.data.chat.chat_layouts import CHATS, PromptAndAnswer, read_document
from trainer.data.chat.conversations import read_conversation
from trainer.data.chat.fields import PLAIN_TEXT, without
from trainer.data.chat.messages import Message
from trainer.data.chat.special_names import SpecialNames
from trainer.data.chat.template import ChatTemplate, Rendering, TemplateFailure
from trainer.data.chat.template_advice import ANSWER, PROBE, RULE, Advice
from trainer.data.chat.template_data import template_data, variants
from trainer.data.chat.template_files import own_template, read_template, tags_are_text
from trainer.data.chat.tokens import NO_END_OF_TURN, MissingTokens, RenderingEncoder, TokensAndMask
from trainer.data.chat.written_check import check_written
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.data.tokenizer.special_tokens import SPECIAL_LOOKING, missing_special_tokens

_VERSION = 2
"""Version of the encoding. It is part of the input of ChatFormat.fingerprint."""
_TOOL = {"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object"}}}
_CORRECT_PROMPT = "let a copy of the template write the same text before an answer and for add_generation_prompt"


class ChatFormat:
    """A chat template combined with a tokenizer.

    end_of_turn: ids of the tokens that end an answer.
    """

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        names: Mapping[str, str] | None,
        allowed_special: Collection[str],
        ignored_fields: Collection[str],
    ):
        """See `compile`."""
        special = tokenizer.special_tokens
        # Names that the template writes, but that are tokens in any text, because the tokenizer's files say so.
        plain = {name: i for name, i in tokenizer.added_tokens.items() if re.fullmatch(SPECIAL_LOOKING, name)}
        name_of = {token: name for name, token in special.items()}
        default_names = {"bos_token": name_of.get(tokenizer.bos, ""), "eos_token": name_of.get(tokenizer.eos, "")}
        self.tokenizer = tokenizer
        self.template = template
        self._ignored_fields = frozenset(ignored_fields)
        self._names = default_names if names is None else dict(names)
        self._special = {name: token for name, token in special.items() if len(name) > 1}  # one character is text
        self._special |= plain
        for name in allowed_special:
            if name not in self._special:
                raise ConfigError("data.allowed_special", f"the tokenizer has no special token {name}")
        self._allowed_special = sorted(allowed_special)
        self._needs_no_names = names is not None and template == own_template(tokenizer.files)
        known = {*self._special, *self._names.values()}
        only_known = tags_are_text(template, tokenizer.files)
        self._special_names = SpecialNames(known, allowed_special, only_known=only_known)
        self._encoder = RenderingEncoder(tokenizer, self._special, plain, self._special_names)
        self._advice = Advice(template, tokenizer, self._special, self._names)
        self._template: ChatTemplate
        self.end_of_turn: tuple[int, ...]
        """Ids of the tokens that end an answer."""

    @classmethod
    def compile(
        cls,
        template: str,
        tokenizer: Tokenizer,
        *,
        names: Mapping[str, str] | None = None,
        allowed_special: Collection[str] = (),
        ignored_fields: Collection[str] = (),
    ) -> "ChatFormat":
        """Compile a template, in a process that renders it.

        Args:
            template: Jinja text.
            tokenizer: Tokenizer of the text.
            names: Text of each template variable such as bos_token (default: the tokenizer's BOS and EOS).
            allowed_special: Special tokens that are recognized in messages too.
            ignored_fields: Names of fields that are removed from documents and messages.

        Raises:
            ConfigError: The template is invalid, needs special tokens that the tokenizer does not have, or ends an answer without
                a special token.
        """
        chat = cls(template, tokenizer, names, allowed_special, ignored_fields)
        try:
            chat._template = ChatTemplate.compile(template)
            chat.end_of_turn = chat._find_end_of_turn()
        except TemplateFailure as failure:
            raise chat._advice.refusal(failure) from None
        return chat

    @property
    def fingerprint(self) -> str:
        """Text that identifies the encoding. Formats with equal fingerprints encode every conversation equally."""
        tokenizer = self.tokenizer
        shape = [_VERSION, self.template, self._names, self._special, self._allowed_special, tokenizer.fingerprint]
        shape += [sorted(self._ignored_fields)]
        if tokenizer.parts_fingerprint:
            shape.append(tokenizer.parts_fingerprint)
        if self.has_generation_tags:  # earlier versions of the trainer took the text between them for the answers
            shape.append("answers by origins")
        return "chat-" + hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def has_generation_tags(self) -> bool:
        """Whether the template marks its answers for transformers, which has no effect here."""
        return re.search(r"\{%[-+]?\s*endgeneration\b", self.template) is not None

    @property
    def rewrites_turns(self) -> bool:
        """Whether the text up to the first of two answers differs from the prompt for it, or from the text of a conversation that
        ends with it."""
        for probe in (PROBE, [RULE, *PROBE]):
            first = len(probe) - 3
            with contextlib.suppress(TemplateFailure):
                text = self._text_up_to(probe, first)
                is_prefix = text.startswith(self._render(probe[:first], True).text)
                if not is_prefix or text != self._text_up_to(probe[: first + 1], first):
                    return True
        return False

    def self_contained(self) -> str:
        """Return the template with definitions of bos_token and similar variables, so that it needs no other configuration. The
        tokenizer's own template is returned as it is, because the tokenizer's files define these variables."""
        if self._needs_no_names:
            return self.template
        names = "".join(f"{{% set {name} = {json.dumps(token)} %}}" for name, token in sorted(self._names.items()))
        return f'{names}{{{{ "" }}}}{self.template}'

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping] | None = None,
        loss_mask: Sequence[bool] | None = None,
    ) -> TokensAndMask:
        """Encode a complete conversation. loss_mask: whether each message is a target, shape (messages,). Default: all answers.

        Raises TemplateFailure if the template cannot render the conversation, omits a part of it that would change what is
        trained on, or if an answer cannot be located in the text.
        """
        return self._encode(messages, tools, {}, loss_mask)[0]

    def _encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping] | None,
        arguments: Mapping[str, Any],
        loss_mask: Sequence[bool] | None,
    ) -> tuple[TokensAndMask, set[str]]:
        """Encode a conversation as encode() does. Return also the names of the messages' fields that the template does not use.

        arguments: further variables of the template, by name.
        """
        if loss_mask is None:
            loss_mask = [message["role"] == "assistant" for message in messages]
        rendering, turns, unused, context = self._render_complete(messages, tools, arguments, loss_mask)
        targets = {i for i, is_target in enumerate(loss_mask) if is_target} - context
        return self._encode_rendered(rendering, turns, targets), unused

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode messages up to the start of the next answer. Raises TemplateFailure if the template cannot render them."""
        data = template_data(messages, None, {})
        rendering = self._render_data(data, True)
        turns = {i: turn for i, turn in self._find(rendering, data).items() if turn}
        return self._encode_rendered(rendering, turns, ())[0]

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the text of messages, as transformers' apply_chat_template does without tokenizing it.

        Args:
            messages: Of the conversation.
            add_generation_prompt: Whether the start of the next answer follows. Otherwise, the text ends with that of the last
                message, so that it can be continued.

        Raises:
            TemplateFailure: The template cannot render the messages.
        """
        text = self._render(messages, add_generation_prompt).text
        if add_generation_prompt:
            return text
        last = str(messages[-1]["content"]).strip()
        if last not in text:
            raise TemplateFailure("the template changes the last message, so that it cannot be continued")
        return text[: text.rindex(last) + len(last)]

    def encode_completion(self, prompt: str, completion: str) -> TokensAndMask:
        """Encode a text and its continuation without the template. The prompt, and BOS if the tokenizer adds it, are not targets.
        The completion and EOS are targets."""
        before = [prompt] if prompt else []
        tokens = [*self.tokenizer.prefix, *self._encoder.encode_parts(before, [])]
        targets = [*self._encoder.encode_parts([completion], before), self.tokenizer.eos]
        return tokens + targets, [False] * len(tokens) + [True] * len(targets)

    def encode_document(self, document: Any) -> tuple[TokensAndMask, tuple[str, ...]]:
        """Encode a JSON value in one of the layouts CHATS. Return also the names of its fields that were not used, because they
        have no meaning or are listed in data.ignored_fields. Raises MalformedConversation or TemplateFailure, or RecursionError
        if the value is nested too deeply."""
        document, removed = self.without_ignored_fields(document)
        (found,) = read_document(document, CHATS)
        encoded, unused = self.encode_answer(found)
        return encoded, tuple(sorted(removed | unused))

    def encode_answer(self, found: PromptAndAnswer) -> tuple[TokensAndMask, set[str]]:
        """Encode a prompt and its answer. Return also the names of fields that were not used. Raises MalformedConversation or
        TemplateFailure."""
        if isinstance(found.prompt, str):
            return self.encode_completion(found.prompt, found.answer), {PLAIN_TEXT, *found.unused}
        talk = read_conversation(found)
        for name in talk.arguments:
            if name not in self._template.variables or name in ("messages", "tools", *self._names):
                raise TemplateFailure(f"chat_template_kwargs sets {name}, which is no variable that the template reads")
        encoded, names = self._encode(talk.messages, talk.tools, talk.arguments, talk.loss_mask)
        return encoded, names.union(found.unused, talk.unused)

    def without_ignored_fields(self, document: Any) -> tuple[Any, set[str]]:
        """Return a document without the fields of data.ignored_fields, and the names of those that it had."""
        return without(document, self._ignored_fields)

    def validate_template(self) -> None:
        """Raise ConfigError if training inputs would differ from inference prompts.

        They differ if the template emits the assistant's header only together with an answer.
        """
        try:
            rendering, turns, *_ = self._render_complete(PROBE, None, {}, [False, True] * 2)
            self._encode_rendered(rendering, turns, ())
            self._check_header(rendering.text, turns[1][0])
        except TemplateFailure as failure:
            raise self._advice.refusal(failure) from None

    # ---------------------------------------------------------------- text

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> Rendering:
        return self._render_data(template_data(messages, None, {}), add_generation_prompt)

    def _render_data(self, data: Mapping[str, Any], add_generation_prompt: bool) -> Rendering:
        return self._template.render(self._names, data, add_generation_prompt)

    def _render_complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping] | None,
        arguments: Mapping[str, Any],
        loss_mask: Sequence[bool],
    ) -> tuple[Rendering, dict[int, Turn], set[str], set[int]]:
        """Render a conversation. Return the text, the range of each answer by the index of its message, the names of the
        messages' unused fields, and the indices of the answers that are context because the template omits their reasoning.
        Raises TemplateFailure if another part of the conversation is not in the text, or an answer cannot be located."""
        failures: list[TemplateFailure] = []
        for variant in variants(messages):
            data = template_data(variant, tools, arguments)
            try:
                rendering = self._render_data(data, False)
            except TemplateFailure as failure:
                failures.append(failure)
                continue
            try:
                unused, context = check_written(self._template, rendering, variant, data, loss_mask)
                self._special_names.check_origins(rendering.text, rendering.origins)
                break
            except TemplateFailure as failure:
                failures.insert(0, failure)  # it says more than an error in the template
        else:
            if any(message["role"] == "system" for message in messages) and not failures[0].way_out:
                raise TemplateFailure(failures[0].reason, self._advice.way_to_write_system(self._template))
            raise failures[0]
        turns = self._find(rendering, data)
        for i, is_target in enumerate(loss_mask):
            if is_target and i not in turns:
                raise TemplateFailure(f"the template writes no text of message {i + 1}, an answer to train on")
        for i, turn in turns.items():
            if turn is None:
                reason = f"the template begins message {i + 1} otherwise than the prompt for it"
                raise TemplateFailure(reason, self._advice.ways(_CORRECT_PROMPT))
        return rendering, turns, unused, context

    def _encode_rendered(
        self, rendering: Rendering, turns: Mapping[int, Turn], targets: Collection[int]
    ) -> TokensAndMask:
        try:
            return self._encoder.encode(rendering, turns, targets)
        except MissingTokens as missing:
            raise self._advice.missing_tokens(missing.names) from None

    def _text_up_to(self, messages: Sequence[Message], i: int) -> str:
        """Return the text of a conversation up to the end of answer `i`."""
        data = template_data(messages, None, {})
        rendering = self._render_data(data, False)
        turn = self._find(rendering, data).get(i)
        return rendering.text[: turn[1]] if turn else ""

    def _find(self, rendering: Rendering, data: Mapping[str, Any]) -> dict[int, Turn | None]:
        """Return the range of each answer in a rendering. See find_answers. Raises TemplateFailure if an answer has no end."""

        def end_of_turn(start: int, stop: int) -> int:
            return self._encoder.end_of_turn(rendering, start, stop, self.end_of_turn)

        def render_prompt(leading: Sequence[Message]) -> Rendering:
            return self._render_data({**data, "messages": leading}, True)

        return find_answers(rendering, data, render_prompt, end_of_turn)

    # ---------------------------------------------------------------- checks of a template

    def _find_end_of_turn(self) -> tuple[int, ...]:
        """Return the end-of-turn tokens. Raises TemplateFailure if the template fails or writes no such token."""
        rendering = self._render(PROBE[:2])
        special = [name for name, is_special in self._encoder.pieces(rendering) if is_special]
        missing = [name for name in special if name not in self._special]
        if missing:
            raise self._advice.missing_tokens([*missing, *missing_special_tokens(self.template, self._special)])
        ends = self._ends_of_answers(rendering)
        if not ends:
            raise TemplateFailure(NO_END_OF_TURN)
        with contextlib.suppress(TemplateFailure):  # OLMo 3 ends earlier answers by another token
            ends += self._ends_of_answers(self._render(PROBE))
        with contextlib.suppress(TemplateFailure):  # a template for conversations with tools may be another one
            ends += self._ends_of_answers(self._render_data(template_data(PROBE, [_TOOL], {}), False))
        return tuple(dict.fromkeys(ends))

    def _ends_of_answers(self, rendering: Rendering) -> list[int]:
        """Return the first special token after each answer of a rendered probe."""
        ends = []
        for answer in re.finditer(re.escape(ANSWER), rendering.text):
            following = self._encoder.pieces(rendering, answer.end())
            ends += [self._special[name] for name, is_special in following if is_special and name in self._special][:1]
        return ends

    def _check_header(self, text: str, start: int) -> None:
        """Raise TemplateFailure if the template writes a header before an answer, but not in the prompt for it.

        Args:
            text: Rendered probe.
            start: Where its first answer starts.
        """
        with_prompt, without_prompt = (self._render([QUESTION], is_prompt).text for is_prompt in (True, False))
        header = text[start:].partition(ANSWER)[0]
        if header.strip() and start <= common_start(with_prompt, without_prompt):
            instead = "nothing" if with_prompt == without_prompt else "something else"
            raise TemplateFailure(
                f"the template writes {header!r} before an answer, but {instead} when add_generation_prompt is set",
                self._advice.ways(_CORRECT_PROMPT),
            )


def load_chat_format(
    choice: str, tokenizer: Tokenizer, *, allowed_special: Collection[str] = (), ignored_fields: Collection[str] = ()
) -> ChatFormat:
    """Load a chat format. choice: see read_template. Raises ConfigError if the template cannot be read or used."""
    text, names = read_template(choice)
    return ChatFormat.compile(
        text, tokenizer, names=names, allowed_special=allowed_special, ignored_fields=ignored_fields
    )
