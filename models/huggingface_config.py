"""A model's config.json, read and written with the facts of its family."""

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from typing import Any, get_args

from models.config_json import ROPE_FIELDS, Config, first, read_rope, read_windows, write_rope
from models.huggingface import FIELDS, HuggingFace
from models.sizes import Sizes, require, text_of
from models.spec import SizeError

_SHARED = {*ROPE_FIELDS, "rope_theta", "rope_type", "rope_is_long", "window", "layer_types"}
"""Sizes that are read by read_rope and read_windows, or that config.json does not contain."""

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
"""Defaults that most of transformers' families have."""


def read_sizes(hf: HuggingFace, config: Config) -> Any:
    """Return the sizes that a config.json describes. Raises ValueError for an unsupported model."""
    for key, value in hf.fixed.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} {text_of(config[key])}: this model supports only {text_of(value)}")
    if (per_layer := config.get("per_layer_config")) and not hf.has_layer_config:
        raise ValueError(f"per_layer_config {text_of(per_layer)}: this model supports no sizes of single layers")
    with _own_keys(hf, config) as own_config:
        return _read_sizes(hf, own_config)


def _read_sizes(hf: HuggingFace, config: Config) -> Any:
    """Return the sizes. config: with the family's own keys."""
    defaults = _DEFAULTS | hf.defaults
    nullable = {_key(hf, f.name) for f in fields(hf.sizes_type) if types.NoneType in get_args(f.type)}
    nullable |= {"num_key_value_heads"}  # null: as many as heads
    given = {key: v for key, v in config.items() if v is not None or key in nullable or key not in defaults}
    config = defaults | given
    own = {f for f in fields(hf.sizes_type) if f.name not in _SHARED}
    common = {f for f in own if f.name in {g.name for g in fields(Sizes)}}
    _check(hf, config, common)
    derived = {"num_key_value_heads": config["num_attention_heads"]}
    derived[_key(hf, "head_dim")] = config["hidden_size"] // config["num_attention_heads"]
    config = hf.read({**config, **{key: v for key, v in derived.items() if config.get(key) is None}})
    _check(hf, config, {f for f in own - common if f.name not in hf.omitted})
    values = {f.name: config[_key(hf, f.name)] for f in own if _key(hf, f.name) in config}
    names = {f.name for f in fields(hf.sizes_type)}
    values |= read_windows(config, hf.sizes_type) | read_rope(config, hf.sizes_type)
    try:
        sizes = hf.sizes_type(**{name: value for name, value in values.items() if name in names})
    except SizeError as error:
        message = _renamed(str(error), FIELDS | ROPE_FIELDS | hf.size_keys)
        if "head_dim" in given:
            raise ValueError(message) from None
        raise ValueError(message.replace(" head_dim ", " head_dim (hidden_size / num_attention_heads) ")) from None
    # None: a family with another key of this size, of which `read` compares head_dim.
    if config.get("head_dim") not in (None, sizes.head_dim):
        message = f"must be hidden_size / num_attention_heads = {sizes.head_dim}"
        raise ValueError(f"head_dim {text_of(config['head_dim'])}: {message}")
    return sizes


def key_of(hf: HuggingFace, size: str, config: Config) -> str:
    """Return the key of a size in a config.json, which may be one of `aliases`."""
    key = _key(hf, size)
    return next((a for a, k in hf.aliases.items() if k == key and config.get(a) is not None), key)


def read_seq_len(hf: HuggingFace, config: Config) -> int:
    """Return the context window of the model that a config.json describes. Raises SizeError."""
    key = "max_position_embeddings"
    names = key, *(alias for alias, own in hf.aliases.items() if own == key)
    seq_len = first(
        *(config.get(name) for name in names), hf.defaults.get(key), 2048
    )  # most classes of transformers have this default
    require(key, seq_len, int)
    return seq_len


def write_config(hf: HuggingFace, sizes: Any, context_window: int) -> dict[str, Any]:
    """Return the fields of config.json that depend on the model. context_window: longest sequence in training."""
    own = [f.name for f in fields(sizes) if f.name not in _SHARED | {*hf.omitted} or f.name == "window"]
    return {
        "architectures": [hf.architecture],
        "model_type": hf.model_type,
        **hf.fixed,
        **{_key(hf, name): getattr(sizes, name) for name in own},
        "head_dim": sizes.head_dim,
        "max_position_embeddings": max(context_window, sizes.context_window),
        **(write_rope(sizes) if hf.writes_rope else {}),
        **hf.write(sizes),
    }


_REWRITTEN = {
    "dtype",
    "torch_dtype",
    "transformers_version",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
"""Fields that write_config does not write, but that say how the files of weights, or the tokens, are."""


def other_fields(hf: HuggingFace, config: Config, sizes: Any) -> dict[str, Any]:
    """Return the fields of a config.json that say nothing that a run may change, such as router_aux_loss_coef: an export keeps
    them. Of a model of several modalities, only those of its text model are. sizes: those that it describes."""
    own = {*write_config(hf, sizes, 1), *hf.aliases, *_REWRITTEN}
    inner = config.get("text_config")
    given = inner if isinstance(inner, Mapping) else config
    # What ends so describes quantized weights, or other models.
    candidates = [k for k in given if k not in own and not k.startswith(("_", "rope_")) and not k.endswith("_config")]
    return {key: config[key] for key in candidates if _is_unread(hf, config, sizes, key)}


def _is_unread(hf: HuggingFace, config: Config, sizes: Any, key: str) -> bool:
    """Return whether a config.json describes the same sizes without a field."""
    try:
        return read_sizes(hf, {k: value for k, value in config.items() if k != key}) == sizes
    except ValueError:
        return False


def _key(hf: HuggingFace, size: str) -> str:
    """Return the key of a size in config.json, or its name if it is omitted there."""
    return size if size in hf.omitted else hf.size_keys.get(size, FIELDS.get(size, size))


@contextmanager
def _own_keys(hf: HuggingFace, config: Config) -> Iterator[Config]:
    """Context manager with the configuration in which `aliases` are replaced. Errors have the names that the file has."""
    given = {}
    for alias, key in hf.aliases.items():
        if (value := config.get(alias)) is None:
            continue
        if config.get(key) is None:
            given[key] = alias
        elif config[key] != value:
            values = f"{key} {text_of(config[key])} and {alias} {text_of(value)}"
            raise ValueError(f"{values} must be equal: they are the same setting")
        config = {**config, key: value}
    try:
        yield config
    except ValueError as error:
        raise ValueError(_renamed(str(error), given)) from None


def _check(hf: HuggingFace, config: Config, sizes: Iterable[Field]) -> None:
    """Raise ValueError if a size has a wrong type, or is missing although it is neither derived nor has a default."""
    for f in sorted(sizes, key=lambda f: f.name):
        if config.get(_key(hf, f.name)) is not None:
            require(_key(hf, f.name), config[_key(hf, f.name)], f.type)
        elif f.default is MISSING and f.name not in ("n_kv_heads", "head_dim"):
            raise ValueError(f"{_key(hf, f.name)} is missing")


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """Return the message with some words replaced."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), message)
