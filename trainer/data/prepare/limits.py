"""The limits of bad documents."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.base.config import ConfigError, DataConfig
from trainer.data.sources import BadDocument

_SHOWN = 3


@dataclass(frozen=True)
class Counts:
    """Numbers of a dataset, or of the part that has been read."""

    documents: int
    """Number of good documents."""
    bad_documents: int
    files: int = 0
    damaged_files: int = 0
    """Number of files of which a part could not be read."""


def allowed_bad_documents(data: DataConfig) -> int:
    return data.max_bad_documents if data.on_bad_document == "skip" else 0


def check_number(data: DataConfig, counts: Counts, bad_documents: Iterator[BadDocument]) -> None:
    """Raise ConfigError if there are more bad documents than the settings allow. The message lists the first of them.

    This holds for a part of a dataset too, so preparation stops as soon as possible.
    """
    if counts.bad_documents <= allowed_bad_documents(data):
        return
    message = f"{counts.bad_documents} or more documents are unreadable{_first(bad_documents)}"
    if data.on_bad_document == "stop":
        raise ConfigError("data.on_bad_document", message)
    share = _percent(counts.bad_documents, counts.documents + counts.bad_documents)
    if share > data.max_bad_documents_percent:
        message += (
            f"; this is {share:.3g} % of the documents read, so that "
            f"data.max_bad_documents_percent = {data.max_bad_documents_percent:g} must be raised too"
        )
    raise ConfigError("data.max_bad_documents", message)


def check_share(data: DataConfig, counts: Counts, bad_documents: Iterator[BadDocument]) -> None:
    """Raise ConfigError if the share of bad documents or of damaged files in a complete dataset is larger than allowed."""
    for found, total, unit, state in (
        (counts.damaged_files, counts.files, "files", "damaged"),
        (counts.bad_documents, counts.documents + counts.bad_documents, "documents", "unreadable"),
    ):
        share = _percent(found, total)
        if data.on_bad_document == "skip" and share > data.max_bad_documents_percent:
            message = f"{found} of {total} {unit} are {state} ({share:.3g} %){_first(bad_documents)}"
            raise ConfigError("data.max_bad_documents_percent", f"{message}; repair the data, or raise this setting")


def _percent(part: int, total: int) -> float:
    return 100 * part / total if total else 0.0


def _first(bad_documents: Iterator[BadDocument]) -> str:
    return f"; the first: {'; '.join(map(str, itertools.islice(bad_documents, _SHOWN)))}"
