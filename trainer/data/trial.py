"""Data of a dry run: complete stores are read, small datasets are prepared in a temporary folder, and of large ones the first
documents are encoded."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path

from trainer.config import ConfigError, DataConfig
from trainer.data.datasets import SINGLE, all_dataset_configs, blame_setting
from trainer.data.prepare.encode import encoder
from trainer.data.prepare.prepare import locate, store_folder
from trainer.data.sources import BadDocument, Source
from trainer.data.sources.source import Span
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.system.paths import unreadable

PREPARED_BYTES = 64 * 2**20
"""Size of the files of a dataset up to which it is prepared. It takes a minute or less."""
_FIRST_DOCUMENTS = 100


@contextmanager
def trial_stores(stores: Path) -> Iterator[Path]:
    """Context manager of a temporary folder that has links to the complete stores and packings of a folder of stores. What is
    prepared in it is deleted when the block ends."""
    trial = Path(tempfile.mkdtemp(prefix="meshwright-dry-run-"))
    delete = Finalize(
        None, shutil.rmtree, (trial, True), exitpriority=0
    )  # children.end_children calls it after a signal
    try:
        (trial / "packings").mkdir()
        for folder in (stores, stores / "packings"):
            for path in folder.iterdir() if folder.is_dir() else ():
                # A list of member stores has paths relative to its folder, and is soon written again.
                is_complete = path.name != "packings" and not path.name.startswith("prepared-")
                if is_complete and path.suffix != ".lock" and ".tmp-" not in path.name:
                    (trial / path.relative_to(stores)).symlink_to(path.absolute())
        yield trial
    finally:
        delete()


@dataclass(frozen=True)
class LargeDataset:
    """A dataset that is not prepared, and too large for a dry run to do it."""

    name: str
    setting: str
    """The setting that contains its path."""
    config: DataConfig
    source: Source

    def check_first_documents(self, tokenizer: Tokenizer) -> str:
        """Encode the first documents. Return a line that says how many are readable. Raises ConfigError if none is."""
        path = self.source.files[0]
        span = Span(path, 0, os.path.getsize(path))
        with blame_setting(self.setting):
            try:
                results = list(islice(self.source.read(span, encoder(self.config, tokenizer)), _FIRST_DOCUMENTS))
            except OSError as error:
                raise ConfigError("data.path", unreadable(error, path)) from None
            bad = [result for result in results if isinstance(result, BadDocument)]
            if len(bad) == len(results):
                raise ConfigError(
                    "data.path", f"none of the first {len(results)} documents is readable; the first: {bad[0]}"
                )
        tokens = sum(len(result.tokens) for result in results if not isinstance(result, BadDocument))
        size = sum(map(os.path.getsize, self.source.files))
        good = len(results) - len(bad)
        found = (
            f"{good} of the first {len(results)} documents are readable and have {tokens / good:,.0f} tokens on average"
        )
        example = f"; refused: {bad[0]}" if bad else ""
        name = "" if self.name == SINGLE else f"{self.name}: "
        return (
            f"{name}{len(self.source.files)} files, {size / 1e9:.2f} GB, which the run prepares first; {found}{example}"
        )


def large_datasets(data: DataConfig, sets: Mapping[str, str], tokenizer: Tokenizer) -> list[LargeDataset]:
    """Return the datasets that are not prepared and have more than PREPARED_BYTES. Raises ConfigError if one cannot be opened."""
    found = []
    for name, setting, config in all_dataset_configs(data, sets):
        if config.dataset == "prepared":
            continue
        with blame_setting(setting):
            source, key, _ = locate(config, tokenizer)
        size = sum(map(os.path.getsize, source.files))
        if size > PREPARED_BYTES and not store_folder(config, key).exists():
            found.append(LargeDataset(name.partition("/")[2], setting, config, source))
    return found
