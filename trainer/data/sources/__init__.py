"""Readers of documents. A source is a list of files and a function that reads a span of one file."""

from collections.abc import Callable

from trainer.base.config import DataConfig
from trainer.data.sources import records, text, tokens
from trainer.data.sources.files import require_distinct
from trainer.data.sources.source import BadDocument, Document, Source, Span
from trainer.data.tokenizer.protocol import Tokenizer

__all__ = ["DATASETS", "BadDocument", "Document", "Source", "Span", "open_source"]

DATASETS: dict[str, Callable[[DataConfig, Tokenizer], Source]] = {
    "python_stdlib": lambda config, _: text.python_stdlib(config),
    "text": lambda config, _: text.text(config),
    "jsonl": lambda config, _: records.texts(config),
    "parquet": lambda config, _: records.texts(config),
    "huggingface": lambda config, _: records.texts(config),
    "csv": lambda config, _: records.texts(config),
    "tokens": tokens.tokens,
    "chat": lambda config, _: records.records(config),
    "preference": lambda config, _: records.records(config),
}


def open_source(config: DataConfig, tokenizer: Tokenizer) -> Source:
    """Return the source of one dataset. Raises ConfigError if no file matches, a file has the wrong format, or two paths lead to
    the same file.

    tokenizer: the tokenizer that produced the tokens, if the dataset consists of token files.
    """
    source = DATASETS[config.dataset](config, tokenizer)
    require_distinct(source.files)
    return source
