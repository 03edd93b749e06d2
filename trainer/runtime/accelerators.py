"""Accelerators and their peak rates, from the manufacturers' datasheets."""

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

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


# Hosts. host_* of the manufacturers' own nodes; of cards without such a node, those of AWS g5, g6 and g6e (48xlarge), and of a
# workstation with 64 GiB for each card and 10 Gbit/s Ethernet.
_A100_HOST = {"host_memory_gib": 250, "host_memory_bandwidth": 51e9, "pcie_bandwidth": 32e9}
_H100_HOST = {"host_memory_gib": 250, "host_memory_bandwidth": 77e9, "pcie_bandwidth": 64e9}
_PCIE_4 = {"pcie_bandwidth": 32e9, "intra_node_bandwidth": 32e9}
_PCIE_5 = {"pcie_bandwidth": 64e9, "intra_node_bandwidth": 64e9}
_SERVER = _PCIE_4 | {"host_memory_gib": 96, "host_memory_bandwidth": 51e9, "inter_node_bandwidth": 1.56e9}
_L40S_SERVER = _SERVER | {"host_memory_gib": 192, "inter_node_bandwidth": 6.25e9}
_WORKSTATION = _PCIE_4 | {"host_memory_gib": 64, "host_memory_bandwidth": 40e9, "inter_node_bandwidth": 1.25e9}

_A100_FLOPS = {"bf16": 312e12, "fp32": 19.5e12}
_A100 = _A100_HOST | {"flops": _A100_FLOPS, "intra_node_bandwidth": 300e9, "inter_node_bandwidth": 25e9}
_A100_40GB = _A100 | {"host_memory_gib": 125}
_A100_PCIE = _A100 | {"intra_node_bandwidth": 32e9, "inter_node_bandwidth": 12.5e9}
_H100_FLOPS = {"fp8": 1978.9e12, "bf16": 989.4e12, "fp32": 66.9e12}
_H100 = _H100_HOST | {"flops": _H100_FLOPS, "intra_node_bandwidth": 450e9, "inter_node_bandwidth": 50e9}
_H100_PCIE_FLOPS = {"fp8": 1513e12, "bf16": 756e12, "fp32": 51e12}
_H100_PCIE = _H100 | {"flops": _H100_PCIE_FLOPS, "intra_node_bandwidth": 64e9, "inter_node_bandwidth": 25e9}
_H20 = _H100 | {"flops": {"fp8": 296e12, "bf16": 148e12, "fp32": 44e12}}
_NVL = _H100_PCIE | {"flops": {"fp8": 1671e12, "bf16": 835e12, "fp32": 60e12}}
_MI300X_FLOPS = {"bf16": 1307.4e12, "fp32": 163.4e12}
_MI300X = _H100_HOST | {"flops": _MI300X_FLOPS, "intra_node_bandwidth": 448e9, "inter_node_bandwidth": 50e9}
_B200_FLOPS = {"fp8": 4500e12, "bf16": 2250e12, "fp32": 75e12}
_B200 = _H100 | {"flops": _B200_FLOPS, "intra_node_bandwidth": 900e9, "host_memory_bandwidth": 90e9}
# bf16 and fp8 with sums in fp32, which GeForce cards compute at half the rate of sums in fp16.
_RTX_3090 = _WORKSTATION | {"flops": {"bf16": 71e12, "fp32": 35.6e12}}
_RTX_4090 = _WORKSTATION | {"flops": {"fp8": 330.3e12, "bf16": 165.2e12, "fp32": 82.6e12}}
_RTX_5090 = _WORKSTATION | _PCIE_5 | {"flops": {"fp8": 419e12, "bf16": 209.5e12, "fp32": 104.8e12}}
_RTX_A6000 = _WORKSTATION | {"flops": {"bf16": 154.8e12, "fp32": 38.7e12}}
_RTX_6000_ADA = _WORKSTATION | {"flops": {"fp8": 728.5e12, "bf16": 364.2e12, "fp32": 91.1e12}}
_RTX_PRO_6000 = _WORKSTATION | _PCIE_5 | {"flops": {"fp8": 1007.6e12, "bf16": 503.8e12, "fp32": 126e12}}
_A10 = _SERVER | {"flops": {"bf16": 125e12, "fp32": 31.2e12}}
_A10G = _SERVER | {"flops": {"bf16": 70e12, "fp32": 35e12}}
_A40 = _SERVER | {"flops": {"bf16": 149.7e12, "fp32": 37.4e12}}
_L4 = _SERVER | {"flops": {"fp8": 242e12, "bf16": 121e12, "fp32": 30.3e12}}
_L40S = _L40S_SERVER | {"flops": {"fp8": 733e12, "bf16": 362.05e12, "fp32": 91.6e12}}

_NVIDIA = "https://www.nvidia.com/content"
_A100_SHEET = f"{_NVIDIA}/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100_SHEET = "https://resources.nvidia.com/en-us-tensor-core (H100, H200 and NVL datasheets)"
_GH200_SHEET = "NVIDIA GH200 Grace Hopper Superchip datasheet"
_H20_SHEET = "NVIDIA HGX H20 datasheet"
_B200_SHEET = "NVIDIA DGX B200 datasheet"
_MI300X_SHEET = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"
)
_MI325X_SHEET = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html"
_GA102_SHEET = f"{_NVIDIA}/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA_SHEET = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_L4_SHEET = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_BLACKWELL_SHEET = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_PRO_SHEET = "NVIDIA RTX Blackwell PRO GPU architecture whitepaper"
_L40S_SHEET = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
_A10_SHEET = f"{_NVIDIA}/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_A10G_SHEET = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"

# Keyed by the full device name: another model, or a slice of one, has another peak. MFU is not reported for an accelerator
# that is missing here, because a guess would give a wrong figure. memory_gib is what torch reports.
ACCELERATORS = {
    "NVIDIA A100-SXM4-40GB": AcceleratorSpec(
        **_A100_40GB, memory_gib=39.4, memory_bandwidth=1.555e12, source=_A100_SHEET
    ),
    "NVIDIA A100-SXM4-80GB": AcceleratorSpec(**_A100, memory_gib=79.15, memory_bandwidth=2.039e12, source=_A100_SHEET),
    "NVIDIA A100-PCIE-40GB": AcceleratorSpec(
        **_A100_PCIE, memory_gib=39.4, memory_bandwidth=1.555e12, source=_A100_SHEET
    ),
    "NVIDIA A100 80GB PCIe": AcceleratorSpec(
        **_A100_PCIE, memory_gib=79.15, memory_bandwidth=1.935e12, source=_A100_SHEET
    ),
    "NVIDIA H100 80GB HBM3": AcceleratorSpec(**_H100, memory_gib=79.1, memory_bandwidth=3.35e12, source=_H100_SHEET),
    "NVIDIA H100 PCIe": AcceleratorSpec(**_H100_PCIE, memory_gib=79.1, memory_bandwidth=2.0e12, source=_H100_SHEET),
    "NVIDIA H100 NVL": AcceleratorSpec(**_NVL, memory_gib=93.1, memory_bandwidth=3.9e12, source=_H100_SHEET),
    "NVIDIA H200": AcceleratorSpec(**_H100, memory_gib=139.8, memory_bandwidth=4.8e12, source=_H100_SHEET),
    "NVIDIA H200 NVL": AcceleratorSpec(**_NVL, memory_gib=139.8, memory_bandwidth=4.8e12, source=_H100_SHEET),
    "NVIDIA GH200 480GB": AcceleratorSpec(
        **_H100, memory_gib=94.5, memory_bandwidth=4.0e12, source=_GH200_SHEET, gpus_per_node=1
    ),
    "NVIDIA H20": AcceleratorSpec(**_H20, memory_gib=95.1, memory_bandwidth=4.0e12, source=_H20_SHEET),
    "NVIDIA B200": AcceleratorSpec(**_B200, memory_gib=178.3, memory_bandwidth=8e12, source=_B200_SHEET),
    "AMD Instinct MI300X": AcceleratorSpec(**_MI300X, memory_gib=191.7, memory_bandwidth=5.3e12, source=_MI300X_SHEET),
    "AMD Instinct MI325X": AcceleratorSpec(**_MI300X, memory_gib=255.7, memory_bandwidth=6.0e12, source=_MI325X_SHEET),
    "NVIDIA GeForce RTX 3090": AcceleratorSpec(
        **_RTX_3090, memory_gib=23.68, memory_bandwidth=936e9, source=_GA102_SHEET
    ),
    "NVIDIA GeForce RTX 4090": AcceleratorSpec(
        **_RTX_4090, memory_gib=23.64, memory_bandwidth=1008e9, source=_ADA_SHEET
    ),
    "NVIDIA GeForce RTX 5090": AcceleratorSpec(
        **_RTX_5090, memory_gib=31.36, memory_bandwidth=1792e9, source=_BLACKWELL_SHEET
    ),
    "NVIDIA RTX A6000": AcceleratorSpec(**_RTX_A6000, memory_gib=47.4, memory_bandwidth=768e9, source=_GA102_SHEET),
    "NVIDIA RTX 6000 Ada Generation": AcceleratorSpec(
        **_RTX_6000_ADA, memory_gib=47.4, memory_bandwidth=960e9, source=_L4_SHEET
    ),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": AcceleratorSpec(
        **_RTX_PRO_6000, memory_gib=94.9, memory_bandwidth=1792e9, source=_PRO_SHEET
    ),
    "NVIDIA A10": AcceleratorSpec(**_A10, memory_gib=22.05, memory_bandwidth=600e9, source=_A10_SHEET),
    "NVIDIA A10G": AcceleratorSpec(**_A10G, memory_gib=22.05, memory_bandwidth=600e9, source=_A10G_SHEET),
    "NVIDIA A40": AcceleratorSpec(**_A40, memory_gib=44.35, memory_bandwidth=696e9, source=_GA102_SHEET),
    "NVIDIA L4": AcceleratorSpec(**_L4, memory_gib=22.03, memory_bandwidth=300e9, source=_L4_SHEET),
    "NVIDIA L40S": AcceleratorSpec(**_L40S, memory_gib=44.39, memory_bandwidth=864e9, source=_L40S_SHEET),
}

SHORT_NAMES = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-pcie": "NVIDIA A100 80GB PCIe",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "h100-nvl": "NVIDIA H100 NVL",
    "h200": "NVIDIA H200",
    "h200-nvl": "NVIDIA H200 NVL",
    "gh200": "NVIDIA GH200 480GB",
    "h20": "NVIDIA H20",
    "b200": "NVIDIA B200",
    "mi300x": "AMD Instinct MI300X",
    "mi325x": "AMD Instinct MI325X",
    "rtx3090": "NVIDIA GeForce RTX 3090",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtx5090": "NVIDIA GeForce RTX 5090",
    "a6000": "NVIDIA RTX A6000",
    "rtx6000-ada": "NVIDIA RTX 6000 Ada Generation",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "a10": "NVIDIA A10",
    "a10g": "NVIDIA A10G",
    "a40": "NVIDIA A40",
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
}
"""Short name -> full device name."""

_ALIASES = {
    "a100-80gb": "a100",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "a100-sxm": "a100",
    "a100-80gb-pcie": "a100-pcie",
}


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
