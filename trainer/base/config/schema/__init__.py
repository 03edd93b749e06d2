"""Declarations of all settings of a run: type, default, unit, range and meaning. A setting is a field of a section.

These declarations are used by the TOML and command-line parsers, the checks of values, `--help` and docs/configuration.md.
"""
