"""What a folder is, what is wrong with it for a use, and the way out: one function, `recognise`, with one table, `FOLDERS`.

Everything that a user names as a model or an adapter passes through it: checkpoint.init_from, lora.init_from, model.huggingface,
--from, tokenizer.path, data.chat_template, the scripts, `load_model`, and a model of the Hub before it is downloaded. It looks at
names, at small files and at the index of the weights. Whether the content is right is found where the content is read.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.base.config.errors import ConfigError
from trainer.base.system.files import TooLarge, folder_error, read_json_object, read_limited
from trainer.base.system.paths import unreadable
from trainer.base.system.run_files import MANIFEST, MODEL_FILE

Use = Literal["pretrained", "dimensions", "model", "huggingface", "weights", "adapter", "text"]
"""For what a folder is needed: parts of a complete model, whatever the other parts lack; the dimensions of a model; a complete
model; a model in Hugging Face's format, or also all its weights; an adapter; or a tokenizer or a chat template that was not found
in the folder."""
_ALL = frozenset(get_args(Use))

ADAPTER, CHECKPOINT, MODEL, PEFT = "checkpoint of an adapter", "checkpoint", "model folder", "adapter of peft"
"""Kinds of folders that something reads. The others are only recognised."""

_CONFIG, _PEFT_CONFIG = "config.json", "adapter_config.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
"""Name of one of several files with weights, whose group is their number."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024  # bytes; real pointers have about 130
_SAFE = "save the model as safetensors (transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
_SAFE_ADAPTER = "save the adapter as safetensors (peft: PeftModel.from_pretrained(...).save_pretrained(...))"
_ORIGINAL = "use the original model in Hugging Face's format"
_AGAIN = "download the model again"


@dataclass(frozen=True)
class _Contents:
    """What is known about a folder."""

    path: Path | None
    """None: the files are published, and only their names are known."""
    names: Collection[str]

    def matching(self, pattern: str) -> list[str]:
        return [name for name in self.names if re.fullmatch(pattern, name)]

    @property
    def shards(self) -> list[str]:
        return self.matching(_SHARD.pattern)

    @property
    def has_weights(self) -> bool:
        """Whether files with weights, or their list, have the names that are read."""
        return bool({_SINGLE, _INDEX} & set(self.names) or self.shards)

    @property
    def is_downloading(self) -> bool:
        """Whether `hf download --local-dir` has started files in this folder that are not complete."""
        started = None if self.path is None else self.path / ".cache" / "huggingface" / "download"
        return started is not None and any(started.rglob("*.incomplete"))

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the object in a file, or {} if it is unknown or invalid: what reads the file reports this."""
        try:
            return {} if self.path is None else read_json_object(self.path / name)
        except (OSError, ValueError):
            return {}

    def listed(self) -> set[str]:
        """Return the names of the files that the index of the weights lists, or nothing if it is invalid."""
        try:
            names = set(self.json(_INDEX)["weight_map"].values())
        except (KeyError, TypeError, AttributeError):
            return set()
        # An invalid name is reported where the file is opened.
        is_plain = all(isinstance(n, str) and n.isprintable() and n and Path(n).name == n for n in names)
        return names if is_plain else set()


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A row of the table."""

    name: str
    files: str = ""
    """Pattern of names. A folder of this kind has one of them."""
    sign: Callable[[_Contents, list[str]], str | None] = lambda contents, names: _some(names)
    """Returns what shows that a folder is of this kind, or None if it is not. It receives the names that match `files`."""
    what: str = ""
    """What is wrong with it: "{}" stands for the sign."""
    way_out: str = ""
    """What the user can do: "{}" stands for the sign, "{path}" for the folder."""
    serves: frozenset[Use] = frozenset()
    """Uses for which nothing is wrong with it."""
    concerns: frozenset[Use] = _ALL
    """Uses for which the row is looked at."""
    are_weights: bool = False
    """Whether the files are weights that are not read, and may lie beside those that are read."""


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (" ..." if len(names) > 2 else "")


def _of_adapter(contents: _Contents, names: list[str]) -> str | None:
    """Return the base model that a checkpoint of an adapter names."""
    adapter = contents.json(MODEL_FILE).get("lora")
    base = adapter.get("base") if isinstance(adapter, dict) else None
    return (str(base) if base else "BASE") if adapter else None


def _base_of_peft(contents: _Contents, names: list[str]) -> str:
    """Return the base model that adapter_config.json names, in brackets, or ""."""
    base = contents.json(_PEFT_CONFIG).get("base_model_name_or_path")
    return f" ({base})" if isinstance(base, str) and base else ""


def _is_peft(contents: _Contents) -> bool:
    return _PEFT_CONFIG in contents.names


def _is_empty(contents: _Contents, names: list[str]) -> str | None:
    return None if any(not name.startswith(".") for name in contents.names) else ""


def _is_empty_download(contents: _Contents, names: list[str]) -> str | None:
    return _is_empty(contents, names) if contents.is_downloading else None


def _pointers(contents: _Contents, names: list[str]) -> str | None:
    pointers = [name for name in names if contents.path is not None and _is_pointer_file(contents.path / name)]
    return _some(pointers) or None


def _unfinished(contents: _Contents, names: list[str]) -> str | None:
    return _some([name for name in names if name.rpartition(".")[0] not in contents.names]) or None


def _stale_index(contents: _Contents, names: list[str]) -> str | None:
    listed = contents.listed()
    is_stale = {_SINGLE, _INDEX} <= set(contents.names) and listed and _SINGLE not in listed
    return _some(sorted(listed)) if is_stale else None


def _missing_of_index(contents: _Contents, names: list[str]) -> str | None:
    listed = contents.listed()
    missing = sorted(listed.difference(contents.names))
    return f"{_some(missing)}, {len(missing)} of the {len(listed)} files" if missing else None


def _extra_of_index(contents: _Contents, names: list[str]) -> str | None:
    listed = contents.listed()
    return _some([name for name in names if name not in listed]) or None if listed else None


def _beside_single(contents: _Contents, names: list[str]) -> str | None:
    return _some(names) if _SINGLE in contents.names and _INDEX not in contents.names else None


def _without_index(contents: _Contents, names: list[str]) -> str | None:
    counts = sorted({int(match[1]) for name in names if (match := _SHARD.fullmatch(name))})
    is_alone = not {_SINGLE, _INDEX} & set(contents.names)
    return f"{len(names)} of {' or '.join(map(str, counts))} files with weights" if is_alone else None


def _only_weights(contents: _Contents, names: list[str]) -> str | None:
    """Return the files with weights if a model folder has no others."""
    return None if contents.has_weights or _CONFIG not in contents.names else _some(names)


def _snapshot(contents: _Contents, names: list[str]) -> str | None:
    """Return the newest snapshot in a folder of Hugging Face's cache."""
    is_above = "snapshots" in contents.names
    if contents.path is None or not (is_above or "snapshots" in contents.path.name):
        return None
    found = sorted(contents.path.glob("snapshots/*/config.json" if is_above else "*/config.json"))
    return str(found[-1].parent) if found else None


def _when(condition: Callable[[_Contents], bool]) -> Callable[[_Contents, list[str]], str | None]:
    return lambda contents, names: _some(names) if condition(contents) else None


_OWN = frozenset[Use]({"pretrained", "dimensions", "model", "adapter", "text"})
"""Uses for which a folder may be a checkpoint of this trainer."""
_PARTS = frozenset[Use]({"pretrained"})
_WEIGHTS = frozenset[Use]({"weights"})
_FOR_ADAPTER = frozenset[Use]({"adapter"})
_COMPLETE = "use it as checkpoint.init_from"

# fmt: off
FOLDERS = (
    # The first row that concerns the use and is found decides.
    _Kind(name=ADAPTER, files=re.escape(MANIFEST), sign=_of_adapter, concerns=_OWN, serves=_OWN - _PARTS - {"model"},
          what="contains only an adapter", way_out="write a complete model (scripts/convert_hf.py merge {path} FOLDER), or "
          "continue with --from {} --lora.init_from {path}"),
    # What opens a checkpoint with a damaged model.json names the damage.
    _Kind(name=CHECKPOINT, files=re.escape(MANIFEST), sign=_when(lambda c: not c.json(MODEL_FILE)), concerns=_OWN, serves=_OWN),
    _Kind(name=CHECKPOINT, files=re.escape(MANIFEST), concerns=_OWN, serves=_OWN - _FOR_ADAPTER,
          what="contains no adapter, but is the checkpoint of a complete model", way_out=_COMPLETE),
    # A model whose weights are not downloaded gives its tokenizer.
    _Kind(name=MODEL, files=re.escape(_CONFIG), concerns=_PARTS, serves=_PARTS),
    # ---------------------------------------------------------------- not completely there
    _Kind(name="empty, with a started download", sign=_is_empty_download, what="is empty; its download is not complete"),
    _Kind(name="empty", sign=_is_empty, what="is empty"),
    _Kind(name="pointers of Git LFS", files=r".*\.(safetensors|json|jinja|model|tiktoken|txt|bin)", sign=_pointers,
          what="contains Git LFS pointers instead of files ({})", way_out="run `git lfs pull` in this folder"),
    _Kind(name="unfinished download", files=r".*(\.incomplete|\.part|\.crdownload|\.aria2|!qB)", sign=_unfinished,
          what="contains unfinished downloads ({})", way_out=_AGAIN),
    # ---------------------------------------------------------------- an adapter of the package peft
    _Kind(name=PEFT, files=r"adapter_model\.safetensors", sign=_when(_is_peft), concerns=_FOR_ADAPTER, serves=_FOR_ADAPTER),
    _Kind(name="adapter as a pickle", files=r"adapter_model\.bin", sign=_when(_is_peft), concerns=_FOR_ADAPTER,
          what="contains an adapter only as a pickle, which can run code when it is loaded ({})", way_out=_SAFE_ADAPTER),
    _Kind(name="adapter without weights", files=re.escape(_PEFT_CONFIG), concerns=_FOR_ADAPTER,
          what="contains no adapter_model.safetensors", way_out="download the adapter again"),
    # ---------------------------------------------------------------- a model in Hugging Face's format
    _Kind(name="stale index", sign=_stale_index, concerns=_WEIGHTS,
          what=f"contains both {_SINGLE} and {_INDEX}, which names {{}}", way_out="remove the stale one"),
    _Kind(name="missing weights", sign=_missing_of_index, concerns=_WEIGHTS,
          what=f"lacks {{}} that {_INDEX} names", way_out="download them"),
    _Kind(name="weights of two models", files=_SHARD.pattern, sign=_extra_of_index, concerns=_WEIGHTS,
          what=f"contains {{}}, which {_INDEX} does not name", way_out="remove the files of another model"),
    _Kind(name="weights of two models", files=_SHARD.pattern, sign=_beside_single, concerns=_WEIGHTS,
          what=f"contains {_SINGLE} beside {{}}", way_out="remove those that belong to another model"),
    _Kind(name="no index", files=_SHARD.pattern, sign=_without_index, concerns=_WEIGHTS,
          what=f"contains {{}}, but no {_INDEX}", way_out=f"{_AGAIN}, with this file"),
    _Kind(name=MODEL, files=re.escape(_CONFIG), sign=_when(lambda c: c.has_weights), concerns=_WEIGHTS, serves=_WEIGHTS),
    _Kind(name="pickles", files=r"pytorch_model.*\.bin|.*\.pt|.*\.pth", sign=_only_weights, concerns=_WEIGHTS,
          what="contains weights only as pickles, which can run code when they are loaded ({})", way_out=_SAFE,
          are_weights=True),
    _Kind(name="another library", files=r"tf_model\.h5|flax_model\.msgpack|rust_model\.ot", sign=_only_weights,
          concerns=_WEIGHTS, what="contains weights only in the format of another library ({})", way_out=_SAFE,
          are_weights=True),
    _Kind(name=MODEL, files=re.escape(_CONFIG), concerns=_ALL - _WEIGHTS - _PARTS,
          serves=_ALL - _WEIGHTS - _PARTS - _FOR_ADAPTER,
          what="contains a complete model, not an adapter", way_out=_COMPLETE),
    # ---------------------------------------------------------------- something else
    _Kind(name="adapter without settings", files=r"adapter_model\..*", concerns=_FOR_ADAPTER,
          what=f"contains {{}} without {_PEFT_CONFIG}", way_out="download the adapter again"),
    _Kind(name="started download", sign=_when(lambda c: _CONFIG not in c.names and c.is_downloading),
          what="contains a download that is not complete", way_out=_AGAIN),
    _Kind(name=PEFT, files=re.escape(_PEFT_CONFIG), sign=_base_of_peft,
          what="contains an adapter of the package peft, not a model", way_out="use its base model{} here, and the adapter as "
          "lora.init_from, or a folder with both, which peft's merge_and_unload() gives"),
    _Kind(name="GGUF", files=r".*\.gguf", what="contains a model in llama.cpp's format GGUF", way_out=_ORIGINAL,
          are_weights=True),
    _Kind(name="publisher's format", files=r"consolidated.*\.(safetensors|pth)", are_weights=True,
          what="contains weights in the format of their publisher (consolidated)",
          way_out="use the model in Hugging Face's format"),
    _Kind(name="diffusers", files=r"model_index\.json", are_weights=True,
          what="contains a model of the package diffusers, which is not a language model"),
    _Kind(name="DCP", files=r".*\.distcp", what="contains a checkpoint of torch.distributed.checkpoint",
          way_out="convert it to Hugging Face's format", are_weights=True),
    _Kind(name="DeepSpeed", files=r"mp_rank_.*|zero_pp_rank_.*|zero_to_fp32\.py", are_weights=True,
          what="contains a checkpoint of DeepSpeed", way_out="run its zero_to_fp32.py"),
    _Kind(name="ONNX", files=r".*\.onnx", what="contains a model in the format ONNX", way_out=_ORIGINAL, are_weights=True),
    _Kind(name="Hugging Face's cache", sign=_snapshot,
          what="is a folder of Hugging Face's cache", way_out="use its snapshot {}"),
    # ---------------------------------------------------------------- nothing of these
    _Kind(name="no weights", files=re.escape(_CONFIG), sign=_when(lambda c: c.is_downloading), concerns=_WEIGHTS,
          what=f"contains no weights: it has neither {_SINGLE} nor {_INDEX}; its download is not complete"),
    _Kind(name="no weights", files=re.escape(_CONFIG), concerns=_WEIGHTS,
          what=f"contains no weights: it has neither {_SINGLE} nor {_INDEX}"),
    _Kind(name="no model", concerns=frozenset({"huggingface", "weights"}),
          what="is no model in Hugging Face's format, because it has no config.json"),
    _Kind(name="no model", concerns=_PARTS | {"dimensions", "model"},
          what="contains neither manifest.json of a checkpoint nor config.json of a Hugging Face model"),
    _Kind(name="no adapter", concerns=_FOR_ADAPTER,
          what="contains neither adapter_config.json nor a checkpoint of an adapter"),
    _Kind(name="other files", serves=_ALL),
)
"""What a folder can be, how it is recognised, what is wrong with it, and the way out."""
# fmt: on


@dataclass(frozen=True)
class Folder:
    """What a folder is."""

    kind: str
    """Name of a row of FOLDERS."""
    problem: str = ""
    """What is wrong with it for its use, and the way out, without its name. Empty: nothing."""


def recognise(path: Path, use: Use) -> Folder:
    """Return what a folder is, as far as the names of its files and their first bytes show it, and what is wrong with it for a
    use. Raises ConfigError if it is not a folder or cannot be read."""
    if problem := folder_error(path):
        raise ConfigError("", f"{path}: {problem}")
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise ConfigError("", unreadable(error, str(path))) from None
    return _recognise(_Contents(path, names), use)


def recognise_published(names: Iterable[str], use: Use) -> Folder:
    """Return what a folder with these files is, if only their names are known. See `recognise`."""
    return _recognise(_Contents(None, sorted(names)), use)


def _recognise(contents: _Contents, use: Use) -> Folder:
    for kind in FOLDERS:
        names = contents.matching(kind.files) if kind.files else []
        if use not in kind.concerns or (kind.files and not names) or (sign := kind.sign(contents, names)) is None:
            continue
        text = f"{kind.what}; {kind.way_out}" if kind.way_out else kind.what
        return Folder(kind.name, "" if use in kind.serves else text.format(sign, path=contents.path))
    raise AssertionError(use)  # the last row is always found


def require(path: Path, use: Use) -> str:
    """Return the kind of a folder that can be used. Raises ConfigError if something is wrong with it for this use."""
    folder = recognise(path, use)
    if folder.problem:
        raise ConfigError("", f"{path} {folder.problem}")
    return folder.kind


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of this trainer, also of an adapter. Nothing but the name of a file is looked at,
    because a checkpoint may have thousands of them."""
    return (folder / MANIFEST).exists()


def is_adapter(folder: Path) -> bool:
    """Return whether a folder is the checkpoint of an adapter. Raises ConfigError if it is not a folder or cannot be read."""
    return recognise(folder, "adapter").kind == ADAPTER


def unread_weights(folder: Path) -> list[str]:
    """Return the files with weights in other formats, beside the safetensors files that are read."""
    contents = _Contents(folder, sorted(os.listdir(folder)))
    return sorted({name for kind in FOLDERS if kind.are_weights for name in contents.matching(kind.files)})


def is_lfs_pointer(content: bytes) -> bool:
    """Return whether the content of a file is a pointer that Git LFS replaces by the file."""
    return content.startswith(_POINTER) and b"oid sha256:" in content and len(content) <= _LARGEST_POINTER


def _is_pointer_file(path: Path) -> bool:
    try:
        return is_lfs_pointer(read_limited(path, _LARGEST_POINTER))
    except (OSError, TooLarge):
        return False


def pointer_problem(path: Path) -> str:
    """Return why the file cannot be read if it is a Git LFS pointer, else ""."""
    problem = f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"
    return problem if _is_pointer_file(path) else ""
