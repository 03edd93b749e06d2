"""Parts of Hugging Face's config.json that several model families share: positional encoding and windows, read and written."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_args

from models.sizes import ROPES, Sizes, require, text_of

Config = Mapping[str, Any]
"""Content of config.json."""

ROPE_FIELDS = {
    "rope_factor": "factor",
    "rope_original_seq_len": "original_max_position_embeddings",
    "original_seq_len": "original_max_position_embeddings",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_truncate": "truncate",
    "rope_attention_factor": "attention_factor",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
    "rope_short_factors": "short_factor",
    "rope_long_factors": "long_factor",
}
"""Name of a size -> its key in the object rope_scaling or rope_parameters of config.json."""

LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention", "linear": "linear_attention"}
"""Type of layer in the sizes of a family -> its name in config.json."""


def text_config(config: Config) -> Config:
    """Return the configuration of the text model, if config.json describes a multimodal model, otherwise `config`."""
    inner, key = config.get("text_config"), "tie_word_embeddings"
    outer = {key: config[key]} if config.get(key) is not None else {}  # it takes precedence
    return {**config, **inner, **outer} if isinstance(inner, Mapping) else config


def first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def list_of_layers(config: Config, key: str, default: list[Any]) -> list[Any]:
    """Return a list of config.json with one value for each layer. Raises ValueError."""
    values, layers = first(config.get(key), default), config["num_hidden_layers"]
    if not isinstance(values, list) or len(values) != layers:
        found = f"a list of length {len(values)}" if isinstance(values, list) else text_of(values)
        raise ValueError(f"{key} must have one value for each of the {layers} layers, instead of {found}")
    return values


def _object(config: Config, key: str) -> Config:
    """Return a value of config.json that is null or an object. Raises ValueError."""
    value = first(config.get(key), {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} {text_of(value)}: must be null or an object")
    return value


def rope_object(config: Config) -> Config:
    """Return the object that describes the positional encoding of all layers. Raises ValueError."""
    key = "rope_scaling" if _object(config, "rope_scaling") else "rope_parameters"  # as in all versions of transformers
    rope = _object(config, key)
    for layer_type in LAYER_TYPES.values():
        if layer_type in rope:
            raise ValueError(f"{key} {layer_type}: all layers of this model have the same positional encoding")
    return rope


def split_rope(config: Config) -> tuple[Config, Config]:
    """Return the configuration in which the positional encoding of full attention is that of all layers, and the object that
    describes the encoding of layers with a window, which is empty if the file has none. Raises ValueError."""
    full, sliding = LAYER_TYPES["full"], LAYER_TYPES["sliding"]
    scaling, rope = _object(config, "rope_scaling"), _object(config, "rope_parameters")
    if full in scaling or sliding in scaling:
        scaling, rope = {}, scaling
    if rope and not (full in rope or sliding in rope):
        raise ValueError(f"rope_parameters {text_of(rope)}: must describe {full} and {sliding}")
    return {**config, "rope_scaling": _object(rope, full) | scaling, "rope_parameters": None}, _object(rope, sliding)


def sliding_theta(sliding: Config, default: Any) -> Any:
    """Return the rope_theta of layers with a window. Raises ValueError if the context window of these layers is extended, or if
    only a part of each head is rotated.

    Args:
        sliding: Describes their positional encoding, see split_rope.
        default: For files that do not describe it.
    """
    supported = {"rope_type": "default", "partial_rotary_factor": 1.0}
    given = {**sliding, "rope_type": first(sliding.get("rope_type"), sliding.get("type"), "default")}
    for key, value in supported.items():
        if first(given.get(key), value) != value:
            message = f"this model supports only the {key} {value} in layers with a window"
            raise ValueError(f"sliding_attention {text_of(sliding)}: {message}")
    return first(sliding.get("rope_theta"), default)


PREDICTION_KEY = "num_nextn_predict_layers"
"""Key of the number of layers for multi-token prediction in most families."""


def number_of_layers(config: Config, key: str, default: int) -> int:
    """Return a number of layers. Raises ValueError."""
    value = first(config.get(key), default)
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} {text_of(value)} must be an integer from 0")
    return value


def read_prediction(config: Config, key: str = PREDICTION_KEY) -> dict[str, Any]:
    """Return the number of layers for multi-token prediction: one if the file does not have it, as in transformers, and None for
    0. Whether there are any, the tensors tell. Raises ValueError. key: of the number."""
    return {key: number_of_layers(config, key, 1) or None}


def write_prediction(sizes: Sizes, key: str = PREDICTION_KEY) -> dict[str, Any]:
    """Inverse of read_prediction."""
    return {key: len(sizes.predictions)}


def full_attention_interval(types: Sequence[str]) -> int | None:
    """Return the distance between the layers of the type "full", if each of them ends a group of this many layers, or one more
    than the number of layers if there are none. None: they are elsewhere. types: of all layers."""
    interval = types.index("full") + 1 if "full" in types else len(types) + 1
    is_regular = all((name == "full") == ((i + 1) % interval == 0) for i, name in enumerate(types))
    return interval if is_regular else None


def rotary_factor(config: Config, default: float = 1.0) -> Any:
    """Return the fraction of each head's dims that is rotated. default: if the file does not have it. Raises ValueError."""
    return first(rope_object(config).get("partial_rotary_factor"), config.get("partial_rotary_factor"), default)


def read_rope(config: Config, sizes_type: type[Sizes]) -> dict[str, Any]:
    """Return the sizes of the positional encoding. Raises ValueError."""
    rope, supported = rope_object(config), sizes_type.ROPE_TYPES
    if "partial_rotary_factor" not in (f.name for f in fields(sizes_type)) and rotary_factor(config) != 1:
        raise ValueError(f"partial_rotary_factor {text_of(rotary_factor(config))}: this model supports only 1.0")
    rope_type = first(rope.get("rope_type"), rope.get("type"), "default")
    if rope_type not in supported:
        names = " and ".join(filter(None, (", ".join(supported[:-1]), supported[-1])))
        raise ValueError(f"rope_type {text_of(rope_type)}: this model supports only {names}")
    used = {f.name: f.default for f in fields(ROPES[rope_type])}
    used |= {f"rope_{name}": default for name, default in used.items()} | dict.fromkeys(sizes_type.ALWAYS_USED, MISSING)
    keys = {name: key for name, key in ROPE_FIELDS.items() if name in used}
    original, longest = "original_max_position_embeddings", "max_position_embeddings"
    if "original_seq_len" in used:
        # Phi-3's files have it outside the object, where it takes precedence.
        length = first(config.get(original), rope.get(original), config.get(longest), 0)
        rope = {**rope, original: length}
        if rope_type in ("yarn", "longrope") and rope.get("factor") is None:
            for key, value in ((longest, config.get(longest)), (original, length)):
                require(key, value, int)
            rope["factor"] = config[longest] / length
    for key in ("mscale", "mscale_all_dim"):  # as in transformers
        rope = {**rope, key: rope.get(key) or None}
    values = {name: rope[key] for name, key in keys.items() if rope.get(key) is not None}
    if missing := [key for name, key in keys.items() if name not in values and used[name] is MISSING]:
        raise ValueError(f"{missing[0]} is missing")
    given = rope.get("rope_theta", config["rope_theta"])
    may_be_none = types.NoneType in get_args(next(f.type for f in fields(sizes_type) if f.name == "rope_theta"))
    theta = given if may_be_none else first(given, config["rope_theta"])
    return values | {"rope_theta": theta, "rope_type": rope_type}


def write_rope(sizes: Any) -> dict[str, Any]:
    """Return the part of config.json that describes the positional encoding. All versions of transformers read this form."""
    default = {f"rope_{f.name}": f.default for f in fields(ROPES[sizes.rope_type])}
    used = {name: getattr(sizes, name) for name in ROPE_FIELDS if name in default}
    scaling = {ROPE_FIELDS[name]: value for name, value in used.items() if value != default[name]}
    scaling = {key: list(value) if isinstance(value, tuple) else value for key, value in scaling.items()}
    scaling = None if sizes.rope_type == "default" else {"rope_type": sizes.rope_type} | scaling
    return {"rope_theta": sizes.rope_theta, "rope_scaling": scaling}


def write_rope_by_type(sizes: Any, sliding_theta: float) -> dict[str, Any]:
    """Return rope_parameters with an entry for each type of layer. Sliding layers are not extended."""
    rope = write_rope(sizes)
    full = first(rope["rope_scaling"], {"rope_type": "default"}) | {"rope_theta": sizes.rope_theta}
    sliding = {"rope_type": "default", "rope_theta": sliding_theta}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def with_layer_types(config: Config, is_other: Callable[[int], bool], other: str = "sliding") -> Config:
    """Return the configuration with the types of all layers, unless it has them.

    Args:
        config: Content of config.json.
        is_other: Function (index of a layer) -> whether it is of the other type than "full".
        other: This type.
    """
    types = [LAYER_TYPES[other if is_other(i) else "full"] for i in range(config["num_hidden_layers"])]
    return {**config, "layer_types": first(config.get("layer_types"), types)}


def read_windows(config: Config, sizes_type: type[Sizes]) -> dict[str, Any]:
    """Return the window and the types of the layers. If they are not listed, all layers have the window. sizes_type: class of the
    family's sizes. Raises ValueError."""
    sizes = {f.name: f.type for f in fields(sizes_type)}
    own = get_args(get_args(sizes["layer_types"])[0]) if "layer_types" in sizes else ("full", "sliding")
    window = config.get("sliding_window") if "window" in sizes else None
    names = {LAYER_TYPES[name]: name for name in own}
    full, sliding = LAYER_TYPES["full"], LAYER_TYPES["sliding"]
    default = [full if window is None else sliding] * config["num_hidden_layers"]
    listed = list_of_layers(config, "layer_types", default)
    if unknown := [name for name in listed if name not in tuple(names)]:
        raise ValueError(f"layer_types {text_of(unknown[0])}: this model supports only {' and '.join(names)}")
    if window is None and sliding in listed:
        raise ValueError('layer_types "sliding_attention": this model has no sliding_window')
    if window is not None and "layer_types" not in sizes and full in listed:
        # transformers ignores layer_types, and gives all layers the window.
        raise ValueError('layer_types "full_attention": all layers of this model have the sliding_window')
    return {"window": window if sliding in listed else None, "layer_types": tuple(names[name] for name in listed)}


def write_windows(sizes: Any) -> dict[str, Any]:
    """Return the types of the layers and a window, which some classes of transformers require even if no layer has one."""
    return write_layer_types(sizes) | {"sliding_window": first(sizes.window, 4096)}


def write_layer_types(sizes: Any) -> dict[str, Any]:
    """Return the part of config.json that lists the types of the layers."""
    return {"layer_types": [LAYER_TYPES[name] for name in sizes.all_layer_types]}
