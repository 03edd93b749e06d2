"""Settings of the training data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from trainer.base.config.schema.condition import Dataset, When
from trainer.base.config.schema.constraint import FIXED, PER_NODE, Constraint, CountOrZero

DatasetType = Literal[
    "python_stdlib", "text", "jsonl", "parquet", "csv", "huggingface", "tokens", "chat", "preference", "prepared"
]
DATASET_TYPES: tuple[str, ...] = get_args(DatasetType)
CHAT_DATASETS = ("chat", "preference")
"""Types of datasets that consist of conversations. They read the files of the types for records, too."""
TYPES_THAT_NEED_PATH = tuple(type_ for type_ in DATASET_TYPES if type_ not in ("python_stdlib", *CHAT_DATASETS))
"""Types of datasets for which no files are shipped, so that a path must be given."""
READER_OF_ENDING = MappingProxyType(
    {
        ".txt": "text",
        ".md": "text",
        ".jsonl": "jsonl",
        ".json": "jsonl",
        ".parquet": "parquet",
        ".csv": "csv",
        ".tsv": "csv",
        ".arrow": "huggingface",
        ".feather": "huggingface",
        ".bin": "tokens",
        ".npy": "tokens",
    }
)
"""Ending of a file's name -> type of dataset that reads such files."""
COMPRESSED = (".gz", ".zst")
"""Endings of compressed files, after that of their content."""
MESSAGE_COLUMNS = ("role", "content")
DOCUMENT_COLUMNS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "question", "answer", "chosen",
    "rejected", "system", "tools",
)  # fmt: skip
"""Fields of conversations that data.columns may give other names."""
MESSAGE_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Those that hold messages, or a text."""


def split_dataset(text: str) -> tuple[str, str]:
    """Return the type and the path of an entry of data.datasets or evaluation.datasets, TYPE:PATH."""
    type_, _, path = text.partition(":")
    return type_, path


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dataset: Annotated[
        DatasetType,
        Constraint(only_with=(When("data.datasets", negated=True),)),
    ] = "python_stdlib"
    """Type of dataset: the source code of Python's standard library, text files, texts in JSON, Parquet or CSV files or in a
    Hugging Face dataset, token files, conversations or preference pairs in any of these formats, or prepared token stores."""
    path: Annotated[str, PER_NODE, Constraint(only_with=(When("data.datasets", negated=True),))] = ""
    """A file, a folder, a glob pattern, a file that lists such paths (NAME.manifest), or the name of a Hugging Face dataset."""
    datasets: Annotated[Mapping[str, str], PER_NODE] = field(default_factory=dict)
    """Named datasets that replace `dataset` and `path`: datasets = { web = "jsonl:/data/*.jsonl", code = "text:/data/code" }."""
    mixture: Annotated[tuple[str, ...], Constraint(only_with=(When("data.datasets"),))] = ()
    """Dataset weights. Each entry applies from its sample index on: ["0: web=0.7 code=0.3", "1000000: web=0.2 code=0.8"].
    Empty: all datasets have equal weights. When a run resumes, entries that it has not reached yet may be changed."""
    text_field: Annotated[str, Constraint(only_with=(Dataset(("jsonl", "parquet", "csv", "huggingface")),))] = "text"
    """Name of the JSON field or table column that contains the document."""
    columns: Annotated[Mapping[str, str], Constraint(only_with=(Dataset(CHAT_DATASETS),))] = field(default_factory=dict)
    """Names of fields in the data: columns = { question = "query", answer = "reply" } reads the field query as question. They may
    be fields of documents (messages, conversations, prompt, completion, instruction, input, output, question, answer, chosen,
    rejected, system, tools) or of messages (role, content)."""
    subset: Annotated[str, Constraint(only_with=(Dataset(("huggingface", *CHAT_DATASETS)),))] = ""
    """Name of the configuration to use, if a Hugging Face dataset has several."""
    split: Annotated[str, Constraint(only_with=(Dataset(("huggingface", *CHAT_DATASETS)),))] = "train"
    """Name of the split to use, if a Hugging Face dataset has several."""
    token_dtype: Annotated[Literal["uint16", "uint32"], Constraint(only_with=(Dataset(("tokens",)),))] = "uint16"
    """Integer type of the tokens in a .bin file that has no .idx file."""
    on_bad_document: Literal["skip", "stop"] = "skip"
    """Action for an unreadable document. "skip": drop it and record it in the store; "stop": fail on the first such document."""
    max_bad_documents: Annotated[
        int, Constraint(min=0, max=10**15, unit="documents", used_with=When("data.on_bad_document", ("skip",)))
    ] = 1000
    """Maximum number of unreadable documents that preparation skips. If there are more, preparation fails."""
    max_bad_documents_percent: Annotated[
        float, Constraint(min=0, max=100, unit="percent", used_with=When("data.on_bad_document", ("skip",)))
    ] = 1.0
    """Maximum share of unreadable documents among all documents of a dataset, and of damaged files among its files. If a
    dataset exceeds this share, preparation fails."""
    max_document_bytes: Annotated[int, Constraint(min=1, max=2**31, unit="bytes")] = 2**25
    """Maximum length of a readable document. Each process that prepares data needs memory for a few documents of this length."""
    held_out_fraction: Annotated[float, Constraint(min=0, max=0.5)] = 0.01
    """Fraction of documents to hold out for evaluation. They are selected by a hash of their content. If the hash selects none or
    all of a few documents, this share of the tokens, the last ones, is held out instead. With dataset = "prepared", the store
    keeps the fraction with which it was prepared."""
    chat_template: Annotated[str, Constraint(only_with=(Dataset(CHAT_DATASETS),))] = "llama3"
    """Format of conversations: a shipped template, such as "llama3" (docs/chat.md), or a path (.jinja file or model folder)."""
    allowed_special: Annotated[tuple[str, ...], Constraint(only_with=(Dataset(CHAT_DATASETS),))] = ()
    """Special tokens that are recognized inside message text. Other special tokens are plain text there."""
    ignored_fields: Annotated[tuple[str, ...], Constraint(only_with=(Dataset(CHAT_DATASETS),))] = ()
    """Names of fields that are removed from documents and messages. Any other field that neither the format nor the template uses
    makes a document bad if it may change what is trained on; otherwise it is ignored, and counted in the summary."""
    packing: Annotated[Literal["wrapped", "best-fit", "none"], FIXED] = "wrapped"
    """Assignment of documents to samples. "wrapped": concatenate all documents and split the result every seq_len tokens.
    "best-fit": fill samples with complete documents. "none": one document per sample. The last two pad samples to seq_len."""
    long_documents: Annotated[
        Literal["split", "truncate", "drop"], FIXED, Constraint(only_with=(When("data.packing", ("best-fit", "none")),))
    ] = "split"
    """Action for a document longer than a sample. "split": divide it; "truncate": keep its beginning; "drop": skip it."""
    document_mask: Annotated[bool, FIXED] = False
    """Whether attention is restricted to tokens of the same document. If so, positions restart at 0 in each document."""
    shuffle: Annotated[bool, FIXED] = True
    """Whether to shuffle the samples in each epoch. The order depends on seed and epoch. false: samples keep the store order."""
    prefetch: Annotated[CountOrZero, PER_NODE] = 4
    """Number of microbatches that a thread of each rank loads ahead; 0: a step waits until its microbatches are loaded."""
    store_folder: Annotated[str, PER_NODE] = "outputs/token_stores"
    """Path of the folder for prepared token stores. Each store is identified by a hash of its dataset and tokenizer."""
    prepare_workers: Annotated[CountOrZero, PER_NODE] = 0
    """Number of processes that tokenize documents; 0: one process per core."""
