"""Pictures in files, drawn with matplotlib: .png, .svg or .pdf."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError
from trainer.base.config.packages import require_package

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Picture:
    """A file, and the figure of matplotlib that it will contain."""

    figure: Any
    path: Path
    name: str
    """What error messages call it: the command-line option that gave the path, and the path."""

    @classmethod
    def open(cls, path: Path, option: str = "", size: tuple[float, float] = (10, 5)) -> "Picture":
        """Return an empty picture.

        Args:
            path: File to write.
            option: Command-line option that gave the path.
            size: Width and height in inches.

        Raises:
            ConfigError: The picture cannot be written.
        """
        name = f"{option} {path}".lstrip()
        try:
            if path.suffix.lower() not in FORMATS:
                raise ConfigError("", f"the file name must end in {' or '.join(FORMATS)}")
            if not path.parent.is_dir():
                raise ConfigError("", f"folder {path.parent} does not exist")
            figure = require_package("matplotlib.figure", "").Figure(figsize=size, layout="constrained")
            path.touch()
            return cls(figure, path, name)
        except ConfigError as error:
            problem = error.message
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
        raise ConfigError("", f"{name}: {problem}")

    def save(self, dpi: int) -> None:
        """Write the picture. Raises ConfigError if this fails; then no part of the file remains."""
        try:
            self.figure.savefig(self.path, dpi=dpi)
        except OSError as error:
            with suppress(OSError):
                if self.path.is_file():  # not a device
                    self.path.unlink()
            reason = error.strerror or error
            raise ConfigError("", f"{self.name}: cannot be written ({reason})") from None
