"""The settings of a command line."""

from collections.abc import Mapping, Sequence

from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import Layer, Setting, Value, layer_of_value, settings
from trainer.base.config.pretrained import SHORT_FLAGS
from trainer.base.config.unknown_names import AS_FLAG, hint
from trainer.base.system.spelling import did_you_mean, nearest

_WITHOUT_VALUE = ("--dry-run", "--print-config", "--help")


def parse_argv(argv: Sequence[str]) -> dict[str, str]:
    """Return flag -> value. argv: must not contain --help or --print-config. Raises ConfigError."""
    flags: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError("", f"{word}: unexpected argument{_as_flag(word)}")
        flag, equals, value = word.partition("=")
        if equals and flag in _WITHOUT_VALUE:
            raise ConfigError("", f"{flag}: takes no value")
        if not equals:
            value = next(words, None)
            if value is None or value.startswith("--"):
                if flag not in ("--config", *SHORT_FLAGS):
                    _find_setting(flag)  # raises for an unknown flag
                raise ConfigError("", f"{flag}: expects a value")
        if flag in SHORT_FLAGS and not value.strip():  # such as a variable of a shell that is not set
            raise ConfigError("", f'{flag}: the value is empty; {SHORT_FLAGS[flag]} "" would clear that of a file')
        if same := next((f for f in flags if SHORT_FLAGS.get(f, f) == SHORT_FLAGS.get(flag, flag)), ""):
            twice = f"{flag} is given twice, first as {flags[same]}; give it once"
            raise ConfigError("", f"{flag} {value}: {twice if same == flag else f'{same} {flags[same]} is given too'}")
        flags[flag] = value
    return flags


def layer_of_flags(flags: Mapping[str, str]) -> Layer:
    """Return the value of each flag. flags: from parse_argv, without --config. Raises ConfigError for an unknown flag."""
    layer: Layer = {}
    for flag, text in flags.items():
        table = settings().get(flag[2:])
        if table is not None and table.is_table and text.strip() in ("", "{}"):
            layer[table.key] = Value({}, f"{flag} {text}")  # without the entries of the file
            continue
        setting, entry = _find_setting(SHORT_FLAGS.get(flag, flag))
        layer |= layer_of_value(setting, entry, text, f"{flag} {text}", is_text=True)
    return layer


def _as_flag(word: str) -> str:
    """Return a hint about an argument that is no flag."""
    if word.endswith(".toml"):
        return f"; did you mean '--config {word}'?"
    name, _, value = word.lstrip("-+").partition("=")
    key = name.replace("-", "_")
    if key in settings():
        return f"; did you mean '--{key} {value}'?" if value else f"; did you mean '--{key}'?"
    return hint(name, AS_FLAG) or "; write settings as --section.key value"


def _find_setting(flag: str) -> tuple[Setting, str]:
    """Return a flag's setting and the name of its table entry. The name is "" unless the flag is --section.table.entry."""
    section, _, rest = flag[2:].partition(".")
    name, _, entry = rest.partition(".")
    setting = settings().get(f"{section}.{name}")
    if setting is not None and bool(entry) == setting.is_table:
        return setting, entry
    if setting is not None and not entry:
        raise ConfigError(
            "", f"{flag} is a table: set one of its entries with {flag}.NAME VALUE, or empty it with {flag} {{}}"
        )
    raise ConfigError("", f"{flag}: unknown setting{hint(flag, AS_FLAG) or _similar(flag)}")


def _similar(flag: str) -> str:
    """Return "; did you mean '--x.y'?" with the closest flag, or "". A flag without a section must be closer, and is compared
    with names alone too: words of other trainers resemble some setting."""
    others = (*SHORT_FLAGS, "--config", *_WITHOUT_VALUE)
    if "." in flag:
        return did_you_mean(flag, [*(f"--{key}" for key in settings()), *others])
    flags = {key.rpartition(".")[2]: f"--{key}" for key in settings()} | {other[2:]: other for other in others}
    word = flag[2:].replace("-", "_")
    close = flags.get(nearest(word, flags, cutoff=0.75)) or nearest(
        flag, [f"--{key}" for key in settings()], cutoff=0.72
    )
    return f"; did you mean '{close}'?" if close else ""
