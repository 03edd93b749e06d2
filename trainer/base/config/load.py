"""Loading of a Config: layers of values, one over the other. An error message is one line: the setting, its value and origin, the
broken rule, and a likely fix if one is found."""

from collections.abc import Collection, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from trainer.base.config import compatibility
from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import Layer, Value, settings
from trainer.base.config.flags import layer_of_flags, parse_argv
from trainer.base.config.pretrained import layer_of_pretrained, layer_of_tokenizer
from trainer.base.config.remote_paths import with_local_copies
from trainer.base.config.required_files import FILE_SECTIONS, require_files
from trainer.base.config.schema.config import Config
from trainer.base.config.toml_file import DEFAULT_CONFIG, layer_of_file
from trainer.base.config.value_rules import check_values

_RESETS = {
    "training.steps": "training.epochs",
    "training.epochs": "training.steps",
    "model.pretrained": "model.revision",
}
"""Setting -> another one that its layer resets to the default: steps and epochs exclude each other, and a revision is that of the
model beside it."""


def load_config(argv: Sequence[str], check_files: Collection[str] = FILE_SECTIONS, with_weights: bool = True) -> Config:
    """Load and check a configuration.

    Args:
        argv: `--config FILE` (default: train_configs/debug.toml) and any number of `--section.key value`.
        check_files: Sections whose files and packages must exist.
        with_weights: Whether a model that is named by its name on the Hub is downloaded completely, not only its small files.

    Raises:
        ConfigError: Its message is the complete line for the user.
    """
    flags = parse_argv(argv)
    file = flags.pop("--config", str(DEFAULT_CONFIG))
    defaults = {key: Value(setting.default, "") for key, setting in settings().items()}
    given = (layer_of_file(file), layer_of_flags(flags))
    layers = [defaults, *(_resets(layer, defaults) | layer for layer in given)]  # a later one precedes
    layers.append(_switched_off(layers, given[1]))
    if not _merged(layers).run.name:
        layers.append({"run.name": Value(Path(file).stem, "")})
    config = _merged(layers)
    try:
        check_values(config)  # before anything is downloaded
        layers = with_local_copies(layers, check_files, with_weights)
        config = _merged(layers)
        if config.model.pretrained:
            layers = _with_pretrained(layers, config, check_files, with_weights)
            config = _merged(layers)
        # Where the path of a tokenizer leads decides about its file and its kind. Any layer may have given the path.
        config = _merged([*layers, layer_of_tokenizer(config)])
        check_values(config)
        compatibility.check(config)
        require_files(config, check_files)
    except ConfigError as error:
        raise ConfigError("", config.explain(error)) from None
    return config


def _with_pretrained(
    layers: Sequence[Layer], config: Config, check_files: Collection[str], with_weights: bool
) -> list[Layer]:
    """Return the layers with that of the model folder, which stands directly below the layer that names the folder."""
    place = max(i for i, layer in enumerate(layers) if "model.pretrained" in layer)
    given = set().union(*layers[place:])
    found = layer_of_pretrained(config, given, check_files, with_weights)
    # A layer above may contain what the folder gives only in an older form: the branch of a commit, a path that an earlier start
    # has recorded, tokens to which those of the folder have been added.
    above = [{key: value for key, value in layer.items() if key not in found} for layer in layers[place:]]
    return [*layers[:place], found, *above]


def _merged(layers: Sequence[Layer]) -> Config:
    """Return the configuration of layers, of which a later one precedes. The first contains all defaults."""
    sections: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for key, value in layer.items():
            section, name, *entry = key.split(".", 2)
            members = sections.setdefault(section, {})
            if entry and is_dataclass(type_ := settings()[f"{section}.{name}"].type):
                entry_name, _, option = entry[0].partition(".")
                changed = replace(members[name].get(entry_name, type_()), **{option: value.value})
                members[name] = {**members[name], entry_name: changed}
                origins[f"{section}.{name}.{entry_name}"] = value.origin
            else:
                members[name] = {**members[name], entry[0]: value.value} if entry else value.value
            for named in (key, f"{section}.{name}"):
                origins[named] = value.origin
    defaults = Config()
    changed = {name: replace(getattr(defaults, name), **members) for name, members in sections.items()}
    return Config(**changed, origins={key: origin for key, origin in origins.items() if origin})


def _switched_off(layers: Sequence[Layer], flags: Layer) -> Layer:
    """Return the defaults of the settings of the file that have an effect only with others, which a flag has switched off: one
    flag is enough to train without adapters, although the file also sets their scale."""
    off: Layer = {}
    while True:
        config, changed = _merged([*layers, off]), {".".join(key.split(".")[:2]) for key in (*flags, *off)}
        found = {
            setting.key: layers[0][setting.key]
            for setting in settings().values()
            if setting.key in config.origins and setting.key not in changed
            for condition in setting.constraint.only_with
            if changed & condition.settings and not condition.facts and not condition.holds(config, {})
        }
        if not found:
            return off
        off |= found


def _resets(layer: Layer, defaults: Layer) -> Layer:
    """Return the defaults of the settings that a layer resets."""
    keys = [other for key, other in _RESETS.items() if key in layer and layer[key].value not in (None, "")]
    return {key: defaults[key] for key in keys}
