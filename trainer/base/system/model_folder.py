"""Recognition of folders and files that are not, or not completely, a model in Hugging Face's format."""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from trainer.base.system.files import TooLarge, read_json_object, read_limited

_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024  # bytes; real pointers have about 130
_LFS_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt", ".bin")
_PARTIAL = (".incomplete", ".part", ".crdownload", ".aria2", "!qB")
"""Suffixes of files that a download has not completed."""

_SAFE = "save the model as safetensors (transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
_KINDS: tuple[tuple[str, str], ...] = (
    # name of a file that only such a folder has -> what the folder contains, and what to do
    (
        r"adapter_config\.json",
        "contains an adapter of the package peft, not a model; use its base model here, and the adapter as lora.init_from, or a "
        "folder with both, which peft's merge_and_unload() gives",
    ),
    (r".*\.gguf", "contains a model in llama.cpp's format GGUF; use the original model in Hugging Face's format"),
    (
        r"consolidated.*\.(safetensors|pth)",
        "contains weights in the format of their publisher (consolidated); use the model in Hugging Face's format",
    ),
    (r"model_index\.json", "contains a model of the package diffusers, which is not a language model"),
    (r".*\.distcp", "contains a checkpoint of torch.distributed.checkpoint; convert it to Hugging Face's format"),
    (r"mp_rank_.*|zero_pp_rank_.*|zero_to_fp32\.py", "contains a checkpoint of DeepSpeed; run its zero_to_fp32.py"),
    (r".*\.onnx", "contains a model in the format ONNX; use the original model in Hugging Face's format"),
)
_PICKLES = r"pytorch_model.*\.bin|.*\.pt|.*\.pth"
_OTHER_WEIGHTS = r"tf_model\.h5|flax_model\.msgpack|rust_model\.ot"
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
"""Name of one of several files with weights, whose group is their number."""


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
    return f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder" * _is_pointer_file(
        path
    )


def folder_problem(folder: Path) -> str:
    """Return what the folder contains instead of a model in Hugging Face's format, and what to do, without the folder's name. An
    empty text means that nothing was recognized."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ""
    if (problem := _incomplete(folder, names)) or "config.json" in names:
        return problem
    if is_downloading(folder):
        return "contains a download that is not complete; download the model again"
    if what := _kind(names):
        return what.replace("its base model", f"its base model{_base_of(folder)}")
    if "snapshots" in names or "snapshots" in folder.name:
        inner = "snapshots/*" if "snapshots" in names else "*"
        if found := sorted(folder.glob(f"{inner}/config.json")):
            return f"is a folder of Hugging Face's cache; use its snapshot {found[-1].parent}"
    return ""


def _kind(names: Iterable[str]) -> str:
    """Return what a folder with these files contains if it is no model in Hugging Face's format, or ""."""
    names = list(names)
    return next((what for pattern, what in _KINDS if any(re.fullmatch(pattern, name) for name in names)), "")


def _base_of(folder: Path) -> str:
    """Return the base model that an adapter's adapter_config.json names, in brackets, or ""."""
    try:
        base = read_json_object(folder / "adapter_config.json").get("base_model_name_or_path")
    except (OSError, ValueError):
        return ""
    return f" ({base})" if isinstance(base, str) and base else ""


def _incomplete(folder: Path, names: list[str]) -> str:
    """Return which files a folder lacks because they have not been downloaded, or "". names: those of its files."""
    if not [name for name in names if not name.startswith(".")]:
        return "is empty" + ("; its download is not complete" if is_downloading(folder) else "")
    pointers = [name for name in names if name.endswith(_LFS_SUFFIXES) and _is_pointer_file(folder / name)]
    if pointers:
        return f"contains Git LFS pointers instead of files ({_some(pointers)}); run `git lfs pull` in this folder"
    if partial := [name for name in names if name.endswith(_PARTIAL) and name.rpartition(".")[0] not in names]:
        return f"contains unfinished downloads ({_some(partial)}); download the model again"
    return ""


def adapter_problem(folder: Path) -> str:
    """Return what a folder contains instead of an adapter of the package peft, and what to do, without the folder's name. An
    empty text means that the folder has the files of an adapter, or that nothing was recognized."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ""
    if problem := _incomplete(folder, names):
        return problem
    if "adapter_config.json" not in names:
        if "config.json" in names:
            return "contains a complete model, not an adapter; use it as checkpoint.init_from"
        if found := [name for name in names if name.startswith("adapter_model.")]:
            return f"contains {found[0]} without adapter_config.json; download the adapter again"
        return folder_problem(folder)
    if "adapter_model.safetensors" in names:
        return ""
    if "adapter_model.bin" in names:
        saved = "save the adapter as safetensors (peft: PeftModel.from_pretrained(...).save_pretrained(...))"
        return (
            f"contains an adapter only as a pickle, which can run code when it is loaded (adapter_model.bin); {saved}"
        )
    return "contains no adapter_model.safetensors; download the adapter again"


def unread_weights(folder: Path) -> list[str]:
    """Return the files with weights in other formats, beside the safetensors files that are read."""
    others = f"{_PICKLES}|{_OTHER_WEIGHTS}|" + "|".join(pattern for pattern, _ in _KINDS[1:])
    return [name for name in sorted(os.listdir(folder)) if re.fullmatch(others, name)]


def weights_problem(folder: Path) -> str:
    """Return why the weights of a folder with a config.json cannot be read, without the name of the folder, or ""."""
    names = set(os.listdir(folder))
    index_file, single = "model.safetensors.index.json", "model.safetensors"
    shards = sorted(filter(SHARD.fullmatch, names))
    if index_file in names:
        return _index_problem(folder / index_file, names, shards)
    if single in names:
        if shards:
            return f"contains {single} beside {_some(shards)}; remove those that belong to another model"
        return ""
    if shards:
        counts = sorted({int(SHARD.fullmatch(name)[1]) for name in shards})  # type: ignore[index]
        present = f"{len(shards)} of {' or '.join(map(str, counts))} files with weights, but no {index_file}"
        return f"contains {present}; download the model again, with this file"
    if what := _other_weights(names):
        return what
    unfinished = "; its download is not complete" if is_downloading(folder) else ""
    return f"contains no weights: it has neither {single} nor {index_file}{unfinished}"


def _other_weights(names: Collection[str]) -> str:
    """Return which weights there are, if a folder with these files has none as safetensors, or ""."""
    if found := [name for name in sorted(names) if re.fullmatch(_PICKLES, name)]:
        return f"contains weights only as pickles, which can run code when they are loaded ({_some(found)}); {_SAFE}"
    if found := [name for name in sorted(names) if re.fullmatch(_OTHER_WEIGHTS, name)]:
        return f"contains weights only in the format of another library ({_some(found)}); {_SAFE}"
    return _kind(names)


def published_problem(names: Collection[str], with_weights: bool) -> str:
    """Return why a published model with these files cannot be used, without its name, or "". with_weights: whether its weights
    are needed."""
    if "config.json" not in names:
        return _kind(names) or "has no config.json, so that it is no model in Hugging Face's format"
    if not with_weights or any(name == "model.safetensors" or SHARD.fullmatch(name) for name in names):
        return ""
    return _other_weights(names) or "contains no weights"


def _index_problem(index: Path, names: set[str], shards: list[str]) -> str:
    listed = _files_of_index(index)
    if listed is None:
        return ""  # the reader of the index reports this
    missing, single = sorted(listed - names), "model.safetensors"
    if single in names and single not in listed:
        return f"contains both {single} and {index.name}, which names {_some(sorted(listed))}; remove the stale one"
    if missing:
        return (
            f"lacks {_some(missing)}, {len(missing)} of the {len(listed)} files that {index.name} names; download them"
        )
    if extra := [name for name in shards if name not in listed]:
        return f"contains {_some(extra)}, which {index.name} does not name; remove the files of another model"
    return ""


def _files_of_index(index: Path) -> set[str] | None:
    """Return the names of the files that an index lists, or None if it is invalid."""
    try:
        names = set(read_json_object(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # An invalid name is reported where the file is opened.
    is_plain = all(isinstance(name, str) and name.isprintable() and name and Path(name).name == name for name in names)
    return names if names and is_plain else None


def quantization_problem(config: Any, readable: Collection[str]) -> str:
    """Return why the weights cannot be read if config.json says that they are quantized, without the folder's name, or "".
    readable: methods of quantization whose weights can be read."""
    settings = config.get("quantization_config")
    if not settings:
        return ""
    if not isinstance(settings, dict):
        return f"has a quantization_config in config.json that is no object: {settings!r:.40}"
    method = settings.get("quant_method")
    if isinstance(method, str) and method in readable:
        return ""
    known = {
        "bitsandbytes": "bitsandbytes",
        "fp8": "FP8 without weight_block_size",
        "gptq": "GPTQ",
        "awq": "AWQ",
        "mxfp4": "MXFP4",
    }
    name = known.get(method, f"{method:.40}") if isinstance(method, str) else "an unnamed method"
    bits = next((f" in {n} bits" for n in (4, 8) if settings.get(f"load_in_{n}bit") is True), "")
    way_out = "use the original model, in bf16 or another float dtype"
    if bits == " in 4 bits":
        way_out += ", which [lora] base_dtype quantizes while it is loaded"
    return f"contains weights that are quantized with {name}{bits} (quantization_config in config.json); {way_out}"


def is_downloading(folder: Path) -> bool:
    """Return whether `hf download --local-dir` has started files in this folder that are not complete."""
    return any((folder / ".cache" / "huggingface" / "download").rglob("*.incomplete"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (" ..." if len(names) > 2 else "")
