"""Command-line handling for scripts: argument parsing, --help, and one-line errors."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import parse_text, range_error, settings, type_name
from trainer.base.config.foreign import hint_of_option, normalized, replacement
from trainer.base.config.load import load_config
from trainer.base.config.pretrained import SHORT_FLAGS
from trainer.base.config.render import help_text, to_toml
from trainer.base.config.required_files import FILE_SECTIONS
from trainer.base.config.schema.config import Config
from trainer.base.config.schema.constraint import Constraint
from trainer.base.system.children import end_children
from trainer.base.system.files import describe, folder_error
from trainer.base.system.paths import path_error
from trainer.base.system.process import local_rank
from trainer.base.system.signals import Terminated, raise_interrupts
from trainer.base.system.spelling import counted, did_you_mean
from trainer.base.system.streams import (
    STDOUT,
    name_stdout_in_errors,
    open_standard_streams,
    print_error,
    printable,
    require_stdout,
)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default in (None, "", argparse.SUPPRESS) or default is False:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})".lstrip()


class Arguments(argparse.ArgumentParser):
    """Argument parser with --help from the script's docstring, defaults in the help, and one-line errors.

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
        parsed, rest = super().parse_known_args(args, namespace)
        for word in rest:
            flag = word.partition("=")[0]
            if flag.startswith("--") and (hint := self._hint(flag)):
                self.error(f"{flag}: unknown option{hint}")
        return parsed, rest

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
            flag not in own and flag.replace("_", "-") in own
        )  # the settings' flags are in `own`, but are not parsed
        return did_you_mean(flag, own) if is_own or not (self.takes_settings and is_setting) else ""

    def error(self, message: str) -> NoReturn:
        die(message)


def add_layout_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option --layout. default: description of the layouts that are used without this option."""
    names = "settings of a layout; those outside [parallel] are written section.key=value"
    text = f"{names}; repeat --layout for several layouts (default: {default})"
    parser.add_argument("--layout", action="append", metavar='"name=value ..."', help=text)


def answer_early(parser: Arguments) -> None:
    """Print the help, or one line about wrong arguments, and exit. A script calls this before it imports torch, which takes
    seconds, and parses the arguments again later."""
    try:
        try:
            parser.parse_known_args()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _exit_without_reader(128 + signal.SIGPIPE)
    except OSError as error:
        print_error(describe(error))
        _exit_without_reader(2)


def run_to_end(main: Callable[[], None], interrupted: str = "interrupted") -> None:
    """Check the environment and call main. On a ConfigError or a file system error, print one line and exit with code 2. On
    Ctrl-C or SIGTERM, print one line and exit with code 130 or 143. If the reader of stdout has exited, exit with code 141."""
    open_standard_streams()
    name_stdout_in_errors()
    try:
        raise_interrupts()
        check_environment()
        try:
            main()
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        die(str(error))
    except BrokenPipeError:
        _exit_without_reader(128 + signal.SIGPIPE)
    except OSError as error:
        if error.strerror is None:  # not an error of the file system
            raise
        if error.filename == STDOUT:
            print_error(describe(error))
            _exit_without_reader(2)
        die(describe(error))
    except KeyboardInterrupt as interrupt:
        print_error(interrupted)
        end_children()
        os._exit(143 if isinstance(interrupt, Terminated) else 130)


def utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8 text") from None
    return text


def local_path(text: str) -> Path:
    """Parse a path. Options with `type=Path` are parsed by this function."""
    if problem := path_error(text):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return Path(text)


def existing_folder(text: str) -> Path:
    local_path(text)
    if problem := folder_error(text):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return Path(text)


def file_to_write(text: str) -> Path:
    path = local_path(text)
    existing_folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder")
    return path


def number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], Any]:
    """Return the parser of an option whose value is a number from `least` to `most`."""

    def parse(text: str) -> int | float:
        with suppress(ValueError):
            value = parse_text(text, kind)
            if not range_error(value, Constraint(min=least, max=most)):
                return value
        raise argparse.ArgumentTypeError(f"{text}: expected {type_name(kind)} from {least} to {most}")

    return parse


positive_int = number(int, 1, 2**31)
non_negative_int = number(int, 0, 2**31)
positive_float = number(float, 1e-18, 1e18)  # products and quotients of two such numbers are finite
non_negative_float = number(float, 0, 1e18)


def environment_int(name: str, default: int, least: int, most: int = 2**31) -> int:
    """Return the value of an environment variable, or its default if it is not set. If it is invalid, print one line and exit."""
    try:
        return number(int, least, most)(os.environ.get(name, str(default)))
    except argparse.ArgumentTypeError as error:
        die(f"{name}={error}")


def check_environment() -> None:
    """Check LOG_RANK and the variables that torchrun sets. If one is invalid, print one line and exit with code 2."""
    ranks = os.environ.get("LOG_RANK", "0")
    if ranks != "all" and not all(rank.isdecimal() for rank in ranks.split(",")):
        die(f'LOG_RANK={ranks}: expected "all" or a list of ranks such as "0,3"')
    environment_int("LOCAL_RANK", 0, 0)
    environment_int("LOCAL_WORLD_SIZE", 1, 1)
    rank, world_size = environment_int("RANK", 0, 0), environment_int("WORLD_SIZE", 1, 1)
    if rank >= world_size:
        die(f"RANK={rank}: must be below WORLD_SIZE={world_size}")
    if world_size > 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                die(f"WORLD_SIZE={world_size}: needs {name} too; torchrun sets both")
        environment_int("MASTER_PORT", 29500, 1, 65535)


_TASK_COUNTS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpirun", "PMI_RANK"),
    "MV2_COMM_WORLD_SIZE": ("mpirun", "MV2_COMM_WORLD_RANK"),
    "FLUX_JOB_SIZE": ("flux run", "FLUX_TASK_RANK"),
}
"""Variable with the number of tasks that a launcher has started -> this launcher, variable with the index of the task.
SLURM_NTASKS is not among them: it is also set in the shell of an allocation, which is one process."""


def refuse_separate_tasks(nodes: int = 1) -> None:
    """Exit with code 2 if a launcher has started more tasks of this command than the run has nodes. They would be separate runs,
    because nothing says how they form one run. The first task prints one line. nodes: maximum number of nodes."""
    if "WORLD_SIZE" in os.environ:  # this task is a rank of its own
        return
    found = {name: os.environ.get(name, "") for name in _TASK_COUNTS}
    names = [name for name, count in found.items() if count.isdecimal() and int(count) > nodes]
    if not names:
        return
    launcher, index = _TASK_COUNTS[names[0]]
    count = found[names[0]]
    if os.environ.get(index, "0") != "0":
        time.sleep(5)  # as in `die`
        sys.exit(2)
    unset = " ".join(f"-u {name}" for name in names)
    die(
        f"{names[0]}={count}: {launcher} has started {count} tasks of this command, but the run has "
        f"{counted(nodes, 'node')}. For one run, start one task per node and set NNODES, NODE_RANK and MASTER_ADDR "
        f"(docs/multi_node.md). For separate runs, start each task with env {unset}"
    )


def die(line: str) -> NoReturn:
    """Print one line and exit with code 2. Under torchrun, all ranks of a node fail with the same line, but only
    local rank 0 prints it."""
    if local_rank():
        time.sleep(5)  # meanwhile local rank 0 prints the line and exits, and the launcher stops this rank
    print_error(printable(line))
    sys.exit(2)


@contextmanager
def one_line_errors(config: Config) -> Iterator[None]:
    """Context manager that turns a ConfigError into one line on stderr and exit code 2."""
    try:
        yield
    except ConfigError as error:
        die(config.explain(error))


def config_from_command_line(argv: Sequence[str], check_files: Collection[str] = FILE_SECTIONS) -> Config:
    """Return the configuration. With --help or --print-config, print the requested text and exit with code 0. On an error,
    print one line and exit with code 2. check_files: sections whose files must exist."""
    if "--help" in argv or "-h" in argv:
        _print_and_exit(help_text())
    try:
        words, prints = [word for word in argv if word != "--print-config"], "--print-config" in argv
        config = load_config(words, check_files, with_weights=not prints)
    except ConfigError as error:
        die(str(error))
    if prints:
        _print_and_exit(to_toml(config, show_origins=True))
    return config


def _print_and_exit(text: str) -> NoReturn:
    require_stdout()
    name_stdout_in_errors()
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _exit_without_reader(0)
    except OSError as error:
        print_error(describe(error))
        _exit_without_reader(2)
    sys.exit(0)


def _exit_without_reader(code: int) -> NoReturn:
    """Exit although stdout cannot be written, as in `--help | head`. The interpreter's clean-up must not write to it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
