"""What a run that goes on says of settings that are not as they were: all of them."""

import json
import typing
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.checkpoint.resume import ResumePoint, require_compatible
from trainer.config import Config, ConfigError
from trainer.config.fields import is_table, settings
from trainer.config.render import to_toml
from trainer.config.schema import toml_value
from trainer.run.resolve import resolve
from trainer.run.run_folder import changed_settings

SETTINGS = {f"{s.section}.{s.name}": s for members in settings().values() for s in members.values()}
FIXED = {
    "run.seed",
    "training.seq_len",
    "data.packing",
    "data.long_documents",
    "data.document_mask",
    "data.shuffle",
    "optimizer.name",
    "optimizer.state_dtype",
    "training.parameter_dtype",
}
FIXED |= {
    "tokenizer.reuse_reserved_tokens",
    "tokenizer.extra_special_tokens",
    "model.name",
    "model.size",
    "model.overrides",
}
NO_OTHER = {"optimizer.name"}
"""It has one value."""


def another(setting):
    """A value of its kind; whether a run could have it does not matter."""
    kind, value = setting.type, setting.default
    if is_table(kind):
        return {"other": 7 if setting.value_type is not str else "text"}
    options = [option for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Literal
               for option in typing.get_args(part)]  # fmt: skip
    if options:
        return next((option for option in options if option != value), value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return tuple(v / 2 for v in value) if value and isinstance(value[0], float) else ("other",)
    return f"{value}other"


def changed(config, setting):
    section = replace(getattr(config, setting.section), **{setting.name: another(setting)})
    return replace(config, **{setting.section: section})


@pytest.mark.parametrize("key", sorted(SETTINGS.keys() - NO_OTHER))
def test_every_setting_that_changes_is_told(tmp_path, key):
    (tmp_path / "config.toml").write_text(to_toml(Config()))
    now = changed(Config(), SETTINGS[key])
    before, after = (toml_value(config.value(key)) for config in (Config(), now))
    lines = changed_settings(ResumePoint(tmp_path, {}), now)
    if is_table(SETTINGS[key].type):
        assert len(lines) == 1 and lines[0].startswith(key)
    else:
        assert lines == [f"{key} {before} -> {after}"]


def test_those_without_which_it_would_be_another_run_are_refused():
    assert {key for key, setting in SETTINGS.items() if setting.constraint.fixed_on_resume} == FIXED
    fingerprint = resolve(Config(), 1).fingerprint
    fingerprint = json.loads(json.dumps(fingerprint))  # as a checkpoint holds it
    saved = ResumePoint(Path("step-00000001"), {"fingerprint": fingerprint})
    for key in FIXED - NO_OTHER:
        if SETTINGS[key].section == "model":
            continue  # its sizes count
        with pytest.raises(ConfigError, match=rf"cannot resume from step-00000001: {key} was .*, is "):
            require_compatible(saved, fingerprint | {key: another(SETTINGS[key])})
    larger = replace(Config().model, overrides={"n_layers": 9})
    with pytest.raises(ConfigError, match=r": model\.n_layers was 8, is 9; another"):
        require_compatible(saved, resolve(replace(Config(), model=larger), 1).fingerprint)
