"""Data of a dry run: complete stores are read, small datasets are prepared in a temporary folder, and of large ones the first
documents are encoded."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path

from trainer.base.config import Config, ConfigError, DataConfig
from trainer.base.system.paths import unreadable
from trainer.base.system.spelling import counted
from trainer.data.build import Datasets
from trainer.data.datasets import SINGLE, all_dataset_configs, blame_setting
from trainer.data.prepare.encode import Encoded, encoder
from trainer.data.prepare.prepare import locate, prepare, require_store_folder, store_folder
from trainer.data.sources import BadDocument, Source, open_source
from trainer.data.sources.source import Span
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.run.training_data import prepare_and_open
from trainer.state import TrainState
from trainer.tools.report.view.dataset_table import dataset_table, refusals
from trainer.tools.report.view.text import table_lines

PREPARED_BYTES = 64 * 2**20
"""Size of the files of a dataset up to which it is prepared. It takes a minute or less."""
_FIRST_DOCUMENTS = 100


@dataclass
class TrialStores:
    """The stores of a dry run."""

    folder: Path
    """The temporary folder."""
    lines: list[str] = field(default_factory=list)
    """What `open` has found: the table of the datasets, or a line for each dataset that is too large."""

    def open(self, config: Config, tokenizer: Tokenizer, saved: TrainState | None) -> Datasets | None:
        """Like `prepare_and_open`, but return None if a dataset is too large to be prepared here."""
        config = replace(config, data=replace(config.data, store_folder=str(self.folder)))
        data, sets = config.data, config.evaluation.datasets
        if large := large_datasets(data, sets, tokenizer):
            self.lines = [f"{'data':<14}{dataset.check_first_documents(tokenizer)}" for dataset in large]
            return None
        datasets = prepare_and_open(config, tokenizer, saved)
        configs = all_dataset_configs(data, sets)
        stores = {name: prepare(dataset, config.tokenizer, tokenizer) for name, _, dataset in configs}
        evaluates = config.evaluation.interval_steps > 0
        rows = dataset_table(data, sets, stores, config.training, datasets.phases, evaluates)
        self.lines = [*table_lines(rows), *refusals(data, sets, stores), ""]
        return datasets


@contextmanager
def trial_stores(stores: Path) -> Iterator[TrialStores]:
    """Context manager of a temporary folder that has links to the complete stores and packings of a folder of stores. What is
    prepared in it is deleted when the block ends."""
    require_store_folder(stores)
    trial = Path(tempfile.mkdtemp(prefix="meshwright-dry-run-"))
    # children.end_children calls it after a signal
    delete = Finalize(None, shutil.rmtree, (trial, True), exitpriority=0)
    try:
        (trial / "packings").mkdir()
        for folder in (stores, stores / "packings"):
            for path in folder.iterdir() if folder.is_dir() else ():
                # A list of member stores has paths relative to its folder, and is soon written again.
                is_complete = path.name != "packings" and not path.name.startswith("prepared-")
                if is_complete and path.suffix != ".lock" and ".tmp-" not in path.name:
                    (trial / path.relative_to(stores)).symlink_to(path.absolute())
        yield TrialStores(trial)
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

    @property
    def _files(self) -> str:
        return counted(len(self.source.files), "file")

    def check_first_documents(self, tokenizer: Tokenizer) -> str:
        """Encode the first documents. Return a line that says how many are readable. Raises ConfigError if none is."""
        with blame_setting(self.setting):
            results = list(islice(self._results(tokenizer), _FIRST_DOCUMENTS))
            bad = [result for result in results if isinstance(result, BadDocument)]
            if not results:
                found = f"{self._files} ({counted(size_of(self.source), 'byte')}) without a document"
                raise ConfigError("data.path", f"this dataset contains no readable document; found {found}")
            if len(bad) == len(results):
                raise ConfigError(
                    "data.path", f"none of the first {len(results)} documents is readable; the first: {bad[0]}"
                )
            size = size_of(self.source)
        tokens = sum(len(result.tokens) for result in results if not isinstance(result, BadDocument))
        good = len(results) - len(bad)
        found = (
            f"{good} of the first {len(results)} documents are readable and have {tokens / good:,.0f} tokens on average"
        )
        example = f"; refused: {bad[0]}" if bad else ""
        name = "" if self.name == SINGLE else f"{self.name}: "
        return f"{name}{self._files}, {size / 1e9:.2f} GB, which the run prepares first; {found}{example}"

    def _results(self, tokenizer: Tokenizer) -> Iterator[Encoded | BadDocument]:
        """Yield the documents of all files, encoded. Raises ConfigError."""
        encode = encoder(self.config, tokenizer)
        for path in self.source.files:
            try:
                yield from self.source.read(Span(path, 0, os.path.getsize(path)), encode)
            except OSError as error:
                raise ConfigError("data.path", unreadable(error, path)) from None


def size_of(source: Source) -> int:
    """Return the size of the files in bytes. Raises ConfigError if a file has disappeared or cannot be reached."""
    size = 0
    for path in source.files:
        try:
            size += os.path.getsize(path)
        except OSError as error:
            raise ConfigError("data.path", unreadable(error, path)) from None
    return size


def large_datasets(data: DataConfig, sets: Mapping[str, str], tokenizer: Tokenizer) -> list[LargeDataset]:
    """Return the datasets that are not prepared and have more than PREPARED_BYTES. Raises ConfigError if one cannot be opened."""
    found = []
    for name, setting, config in all_dataset_configs(data, sets):
        if config.dataset == "prepared":
            continue
        with blame_setting(setting):
            source = open_source(config, tokenizer)
            if size_of(source) > PREPARED_BYTES and not _is_prepared(config, tokenizer):
                found.append(LargeDataset(name.partition("/")[2], setting, config, source))
    return found


def _is_prepared(config: DataConfig, tokenizer: Tokenizer) -> bool:
    """Return whether the store of a dataset exists. Its key is the hash of all files, which are read only if the folder has a
    store of a dataset of this format."""
    if not any(store_folder(config, "").parent.glob(f"{config.dataset}-*")):
        return False
    _, key, _ = locate(config, tokenizer)
    return store_folder(config, key).exists()
