"""A configuration as text: TOML, --help, and the tables of docs/configuration.md."""

from trainer.config.fields import Setting, is_table, settings, type_name
from trainer.config.schema import Config, toml_value

USAGE = "usage: train.py [--config FILE.toml] [--SECTION.KEY VALUE ...] [--print-config] [--help]"


def to_toml(config: Config) -> str:
    """The whole configuration, every default written out; load_config reads it back equal."""
    lines = []
    for section, members in settings().items():
        lines.append(f"[{section}]")
        values = getattr(config, section)
        lines += [f"{name} = {toml_value(getattr(values, name))}" for name in members]
        lines.append("")
    return "\n".join(lines)


def _limits(setting: Setting) -> str:
    """Unit and range, as they stand in brackets behind a default."""
    constraint = setting.constraint
    parts = [constraint.unit] if constraint.unit else []
    if constraint.min is not None:
        parts.append(f"at least {constraint.min}")
    if constraint.exclusive_min is not None:
        parts.append(f"above {constraint.exclusive_min}")
    if constraint.max is not None:
        parts.append(f"at most {constraint.max}")
    if constraint.fixed_on_resume:
        parts.append("fixed on resume")
    return ", ".join(parts)


def help_text() -> str:
    lines = [
        USAGE,
        "",
        "Settings come from the TOML file (default: train_configs/debug.toml); the command line replaces single ones.",
        "--print-config prints the resulting file and exits.",
    ]
    for section, members in settings().items():
        lines += ["", f"[{section}]"]
        for s in members.values():
            flag = s.flag + (".NAME" if is_table(s.type) else "")
            limits = _limits(s)
            lines.append(
                f"  {flag}: {type_name(s.type)}; default {toml_value(s.default)}" + (f" ({limits})" * bool(limits))
            )
            lines.append(f"      {s.doc}")
    return "\n".join(lines)


def settings_as_markdown() -> str:
    """The text of docs/configuration.md below its introduction: one table for each section."""
    lines = []
    for section, members in settings().items():
        lines += [f"## [{section}]", "", "| key | type | default | unit, range | meaning |", "|---|---|---|---|---|"]
        for s in members.values():
            cells = (f"`{s.name}`", type_name(s.type), f"`{toml_value(s.default)}`", _limits(s), s.doc)
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
        lines.append("")
    return "\n".join(lines)
