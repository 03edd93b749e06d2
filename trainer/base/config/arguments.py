"""Parser of the arguments of scripts."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer.base.config.argument_types import Readable, local_path
from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import settings
from trainer.base.config.foreign import hint_of_option, normalized, replacement
from trainer.base.config.pretrained import SHORT_FLAGS
from trainer.base.system.spelling import did_you_mean


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default in (None, "", argparse.SUPPRESS) or default is False:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})".lstrip()


class Arguments(argparse.ArgumentParser):
    """Argument parser with --help from the script's docstring and defaults in the help. Wrong arguments are a ConfigError.

    doc: help text. Its first paragraph is printed before the options, and the other paragraphs are printed after them.
    settings: whether the script also accepts `--config FILE` and `--section.key value`. parse_known_args returns them unparsed.
    """

    def __init__(self, doc: str = "", settings: bool = False, **options: Any):
        summary, _, rest = doc.partition("\n\n")
        options = {"description": summary, "epilog": rest or None, "allow_abbrev": False, **options}
        super().__init__(formatter_class=_HelpFormatter, **options)
        self.register("type", Path, local_path)
        self.takes_settings = settings
        if settings:
            text = (
                "--config FILE, --from FOLDER and --section.key value set any setting that python train.py --help lists"
            )
            self.add_argument_group("settings of the trainer", text)
            for flag, metavar in (("--config", "FILE"), ("--from", "FOLDER"), ("--section.key", "value ...")):
                # Shown in the usage, but not parsed.
                self._actions.append(argparse.Action([flag], argparse.SUPPRESS, metavar=metavar, help="setting"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else args
        if self._subparsers is None:  # before it is missed that a required option, which is misspelt, is missing
            self._refuse_unknown([word for word in words if word.partition("=")[0] not in self._option_string_actions])
        parsed, rest = super().parse_known_args(args, namespace)
        self._refuse_unknown(rest)
        for name, value in vars(parsed).items():  # nothing is downloaded before all arguments are known to be right
            if isinstance(value, Readable):
                setattr(parsed, name, value.local())
            elif isinstance(value, list):
                setattr(parsed, name, [v.local() if isinstance(v, Readable) else v for v in value])
        return parsed, rest

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("--") and (hint := self._hint(flag)):
                self.error(f"{flag}: unknown option{hint}")

    def _hint(self, flag: str) -> str:
        """Return a hint about an unknown option, or "" if there is none or it may be a setting."""
        if used := hint_of_option(Path(self.prog.split()[0]).stem, flag):
            return f"; use {used}"
        own = [name for action in self._actions for name in action.option_strings]
        name = normalized(flag)
        is_setting = (
            "." in name
            or name in ("config", "print_config", *map(normalized, SHORT_FLAGS))
            or replacement(name, "{}")
            or any(s.name == name for s in settings().values())
        )
        is_own = (
            flag.replace("_", "-") in own and flag not in own
        )  # the settings' flags are in `own`, but are not parsed
        return did_you_mean(flag, own) if is_own or not (self.takes_settings and is_setting) else ""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("", message)


def add_layout_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option --layout. default: description of the layouts that are used without this option."""
    names = "settings of a layout; those outside [parallel] are written section.key=value"
    text = f"{names}; repeat --layout for several layouts (default: {default})"
    parser.add_argument("--layout", action="append", metavar='"name=value ..."', help=text)
