"""What a user can do about a template that cannot be used, or that cannot render a conversation."""

import contextlib
from collections.abc import Mapping, Sequence

from trainer.base.config import ConfigError
from trainer.data.chat.answers import QUESTION
from trainer.data.chat.template import ChatTemplate, TemplateFailure
from trainer.data.chat.template_data import template_data
from trainer.data.chat.template_files import SETTING, fitting_templates, own_template, read_template, usable_templates
from trainer.data.chat.written_check import check_written
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.data.tokenizer.special_tokens import reserved_names

ANSWER = "An answer."
PROBE = [QUESTION, {"role": "assistant", "content": ANSWER}] * 2
"""A conversation that every template must render."""
RULE = {"role": "system", "content": "A rule."}


class Advice:
    """Ways out of the failures of a template with a tokenizer."""

    def __init__(self, template: str, tokenizer: Tokenizer, special: Mapping[str, int], names: Mapping[str, str]):
        """Keep what advice depends on.

        Args:
            template: Jinja text.
            tokenizer: Tokenizer of the text.
            special: Name of each special token that the template may write -> its id.
            names: Text of each template variable.
        """
        self._source = template
        self._tokenizer = tokenizer
        self._special = special
        self._names = names
        self._system: str | None = None

    def refusal(self, failure: TemplateFailure) -> ConfigError:
        """Return the error of a template that cannot be used, with a way out."""
        if not failure.way_out:
            failure = TemplateFailure(failure.reason, self.ways())
        return ConfigError(SETTING, str(failure))

    def ways(self, *others: str) -> str:
        """Return what can be done about the template. It may be replaced by a shipped template with the same special tokens."""
        fitting = next(fitting_templates(self._source, self._special, self._names), "")
        ways = [f'set data.chat_template = "{fitting}", which has the same special tokens'] if fitting else []
        return ", or ".join([*ways, *others])

    def way_to_write_system(self, template: ChatTemplate) -> str:
        """Return advice that names a shipped template with the same turns, which writes system messages, or "" if this one does
        too. template: the compiled one. The answer is kept: many documents may need it."""
        if self._system is None:
            self._system = self._template_with_system(template)
        return self._system

    def _template_with_system(self, template: ChatTemplate) -> str:
        if _writes_rule(template, self._names):
            return ""
        plain = template_data(PROBE, None, {})
        turns = template.render(self._names, plain, False).text
        for name in fitting_templates(self._source, self._special, self._names):
            other = ChatTemplate.compile(read_template(name)[0])
            with contextlib.suppress(TemplateFailure):
                if other.render(self._names, plain, False).text == turns and _writes_rule(other, self._names):
                    return f'set data.chat_template = "{name}", which writes system messages'
        return ""

    def missing_tokens(self, names: Sequence[str]) -> TemplateFailure:
        """Return the failure of a template that writes special tokens that the tokenizer does not have."""
        names = list(dict.fromkeys(names))
        reason = f"the template writes {', '.join(names)}, which the tokenizer does not have"
        ways = []
        if own := own_template(self._tokenizer.files):
            if own != self._source:
                ways = ["set data.chat_template to the tokenizer's folder, which has a template"]
        elif usable := usable_templates(self._special):
            ways = [f"set data.chat_template to one whose special tokens it has ({', '.join(usable)})"]
        elif self._tokenizer.bos is not None:
            ways = ['set data.chat_template = "llama2", whose only special tokens are BOS and EOS']
        reserved = reserved_names(self._special)[: len(names)]
        if len(reserved) == len(names):
            pairs = ", ".join(f'"{name}" = "{token}"' for name, token in zip(names, reserved, strict=True))
            ways.append(f"set tokenizer.reuse_reserved_tokens = {{ {pairs} }} to add them")
        return TemplateFailure(reason, ", or ".join(ways))


def _writes_rule(template: ChatTemplate, names: Mapping[str, str]) -> bool:
    """Return whether a template writes system messages."""
    messages = [RULE, *PROBE]
    data = template_data(messages, None, {})
    try:
        check_written(template, template.render(names, data, False), messages, data, [False] * len(messages))
    except TemplateFailure:
        return False
    return True
