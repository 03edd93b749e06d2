"""Accelerators and their peak rates. accelerators.toml has the figures of the manufacturers' datasheets."""

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli

from trainer.base.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class AcceleratorSpec:
    """Peak rates and memory of an accelerator in a node. All rates are theoretical; planning multiplies them by efficiencies."""

    flops: Mapping[str, float]
    """Precision ("fp8", "bf16", "fp32") -> dense FLOP/s of matrix products. Without "fp8": no such products, or, on GPUs of AMD,
    in formats that the trainer does not use."""
    memory_gib: float
    """Device memory that the driver makes available to programs, in GiB."""
    memory_bandwidth: float
    """Bandwidth of device memory, in bytes per second."""
    intra_node_bandwidth: float
    """Bandwidth to the node's other accelerators in each direction, in bytes per second."""
    inter_node_bandwidth: float
    """This accelerator's share of the network bandwidth between nodes in each direction, in bytes per second."""
    host_memory_gib: float
    """This accelerator's share of host memory, in GiB. The host_* fields describe the manufacturer's own nodes."""
    host_memory_bandwidth: float
    """This accelerator's share of host memory bandwidth, in bytes per second."""
    pcie_bandwidth: float
    """Bandwidth between host memory and device memory in each direction, in bytes per second."""
    source: str
    """Document with the figures of the device."""
    gpus_per_node: int = 8


def _read() -> tuple[dict[str, AcceleratorSpec], dict[str, str], dict[str, str]]:
    """Return the accelerators by their full names, the full names by short names, and the short names by other names."""
    content = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    accelerators, short_names, aliases = {}, {}, {}
    for name, own in content["accelerators"].items():
        device, host = own.pop("device"), content["hosts"][own.pop("host")]
        aliases |= dict.fromkeys(own.pop("aliases", ()), name)
        accelerators[device] = AcceleratorSpec(**host | own)
        short_names[name] = device
    return accelerators, short_names, aliases


ACCELERATORS, SHORT_NAMES, _ALIASES = _read()
"""Full device name -> figures; short name -> full device name; other name -> short name."""


def short_name(option: str, text: str, others: Collection[str] = ()) -> str:
    """Return the short name of an accelerator, or one of the other values that an option allows. Case, punctuation and words such
    as "NVIDIA" or "RTX" do not matter. Raises ConfigError for an unknown name."""
    names = {name: name for name in (*SHORT_NAMES, *others)} | _ALIASES
    names |= {full: short for short, full in SHORT_NAMES.items()}
    by_word = {_word(name): short for name, short in names.items()}
    if (found := by_word.get(_word(text))) is not None:
        return found
    close = difflib.get_close_matches(_word(text), by_word, n=1)
    hint = f"; did you mean {by_word[close[0]]!r}?" if close else ""
    raise ConfigError("", f"{option} {text}: expected one of {', '.join((*SHORT_NAMES, *others))}{hint}")


def _word(name: str) -> str:
    """Return a device name without case, punctuation and words that all cards of a vendor have."""
    return re.sub("[^a-z0-9]|nvidia|geforce|rtx|amd|instinct|generation", "", name.lower())
