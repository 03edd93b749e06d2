"""Accelerators and their peak rates, from the manufacturers' datasheets."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AcceleratorSpec:
    """Peak rates and memory of an accelerator in a node. All rates are theoretical; planning multiplies them by efficiencies."""

    flops: Mapping[str, float]
    """Precision -> dense FLOP/s of matrix products."""
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
    gpus_per_node: int = 8


_A100_FLOPS = {"bf16": 312e12, "fp32": 19.5e12}
_A100_HOST = {"host_memory_gib": 250, "host_memory_bandwidth": 51e9, "pcie_bandwidth": 32e9}
_A100 = _A100_HOST | {"flops": _A100_FLOPS, "intra_node_bandwidth": 300e9, "inter_node_bandwidth": 25e9}
_A100_40GB = _A100 | {"host_memory_gib": 125}
_A100_PCIE = _A100 | {"intra_node_bandwidth": 32e9, "inter_node_bandwidth": 12.5e9}
_H100_FLOPS = {"bf16": 989.4e12, "fp32": 66.9e12}
_H100_HOST = {"host_memory_gib": 250, "host_memory_bandwidth": 77e9, "pcie_bandwidth": 64e9}
_H100 = _H100_HOST | {"flops": _H100_FLOPS, "intra_node_bandwidth": 450e9, "inter_node_bandwidth": 50e9}
_H100_PCIE_FLOPS = {"bf16": 756e12, "fp32": 51e12}
_H100_PCIE = _H100 | {"flops": _H100_PCIE_FLOPS, "intra_node_bandwidth": 64e9, "inter_node_bandwidth": 25e9}
_H20_FLOPS = {"bf16": 148e12, "fp32": 44e12}
_H20 = _H100 | {"flops": _H20_FLOPS}
_NVL_FLOPS = {"bf16": 835e12, "fp32": 60e12}
_NVL = _H100_PCIE | {"flops": _NVL_FLOPS}
_MI300X_FLOPS = {"bf16": 1307.4e12, "fp32": 163.4e12}
_MI300X = _H100_HOST | {"flops": _MI300X_FLOPS, "intra_node_bandwidth": 448e9, "inter_node_bandwidth": 50e9}
_B200_FLOPS = {"bf16": 2250e12, "fp32": 75e12}
_B200 = _H100 | {"flops": _B200_FLOPS, "intra_node_bandwidth": 900e9, "host_memory_bandwidth": 90e9}

# Keyed by the full device name: another model, or a slice of one, has another peak. MFU is not reported for an accelerator
# that is missing here, because a guess would give a wrong figure.
ACCELERATORS = {
    "NVIDIA A100-SXM4-40GB": AcceleratorSpec(**_A100_40GB, memory_gib=39.4, memory_bandwidth=1.555e12),
    "NVIDIA A100-SXM4-80GB": AcceleratorSpec(**_A100, memory_gib=79.15, memory_bandwidth=2.039e12),
    "NVIDIA A100-PCIE-40GB": AcceleratorSpec(**_A100_PCIE, memory_gib=39.4, memory_bandwidth=1.555e12),
    "NVIDIA A100 80GB PCIe": AcceleratorSpec(**_A100_PCIE, memory_gib=79.15, memory_bandwidth=1.935e12),
    "NVIDIA H100 80GB HBM3": AcceleratorSpec(**_H100, memory_gib=79.1, memory_bandwidth=3.35e12),
    "NVIDIA H100 PCIe": AcceleratorSpec(**_H100_PCIE, memory_gib=79.1, memory_bandwidth=2.0e12),
    "NVIDIA H200": AcceleratorSpec(**_H100, memory_gib=139.8, memory_bandwidth=4.8e12),
    "NVIDIA H100 NVL": AcceleratorSpec(**_NVL, memory_gib=93.1, memory_bandwidth=3.9e12),
    "NVIDIA H200 NVL": AcceleratorSpec(**_NVL, memory_gib=139.8, memory_bandwidth=4.8e12),
    "NVIDIA GH200 480GB": AcceleratorSpec(**_H100, memory_gib=94.5, memory_bandwidth=4.0e12, gpus_per_node=1),
    "NVIDIA H20": AcceleratorSpec(**_H20, memory_gib=95.1, memory_bandwidth=4.0e12),
    "AMD Instinct MI300X": AcceleratorSpec(**_MI300X, memory_gib=191.7, memory_bandwidth=5.3e12),
    "AMD Instinct MI325X": AcceleratorSpec(**_MI300X, memory_gib=255.7, memory_bandwidth=6.0e12),
    "NVIDIA B200": AcceleratorSpec(**_B200, memory_gib=178.3, memory_bandwidth=8e12),
}

SHORT_NAMES = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}
