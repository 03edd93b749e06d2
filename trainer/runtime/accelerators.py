"""What devices can do, by their makers' datasheets."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AcceleratorSpec:
    """One device, in machines of several. All rates are peaks; what of them is reached is for others to say."""

    flops: Mapping[str, float]
    """Precision -> dense FLOP/s of matrix products."""
    memory_gib: float
    """As the driver gives it to programs."""
    bandwidth: float
    """Bytes per second to and from its memory."""
    link: float
    """Bytes per second, in each direction, to the other devices of its machine."""
    network: float
    """Bytes per second, in each direction, to other machines: this device's share."""
    host_memory_gib: float
    """Of its machine's memory, this device's share; as all that follows, of the makers' own machines."""
    host_bandwidth: float
    """Bytes per second to and from that memory: its share."""
    host_link: float
    """Bytes per second between that memory and the device's, in each direction."""
    gpus_per_node: int = 8


_A100_HOST = {"host_memory_gib": 250, "host_bandwidth": 51e9, "host_link": 32e9}
_H100_HOST = {"host_memory_gib": 250, "host_bandwidth": 77e9, "host_link": 64e9}
_A100 = _A100_HOST | {"flops": {"bf16": 312e12, "fp32": 19.5e12}, "link": 300e9, "network": 25e9}
_A100_PCIE = _A100 | {"link": 32e9, "network": 12.5e9}

# Under the whole name: another board, or a slice of one, has another peak. A device that is not here has no MFU: a guess would
# be a wrong figure.
ACCELERATORS = {
    "NVIDIA A100-SXM4-40GB": AcceleratorSpec(**_A100 | {"host_memory_gib": 125}, memory_gib=39.4, bandwidth=1.555e12),
    "NVIDIA A100-SXM4-80GB": AcceleratorSpec(**_A100, memory_gib=79.15, bandwidth=2.039e12),
    "NVIDIA A100-PCIE-40GB": AcceleratorSpec(**_A100_PCIE, memory_gib=39.4, bandwidth=1.555e12),
    "NVIDIA A100 80GB PCIe": AcceleratorSpec(**_A100_PCIE, memory_gib=79.15, bandwidth=1.935e12),
    "NVIDIA H100 80GB HBM3": AcceleratorSpec(
        flops={"bf16": 989.4e12, "fp32": 66.9e12},
        memory_gib=79.1,
        bandwidth=3.35e12,
        link=450e9,
        network=50e9,
        **_H100_HOST,
    ),
    "NVIDIA H100 PCIe": AcceleratorSpec(
        flops={"bf16": 756e12, "fp32": 51e12}, memory_gib=79.1, bandwidth=2.0e12, link=64e9, network=25e9, **_H100_HOST
    ),
    "NVIDIA H200": AcceleratorSpec(
        flops={"bf16": 989.4e12, "fp32": 66.9e12},
        memory_gib=139.8,
        bandwidth=4.8e12,
        link=450e9,
        network=50e9,
        **_H100_HOST,
    ),
    "NVIDIA B200": AcceleratorSpec(
        flops={"bf16": 2250e12, "fp32": 75e12},
        memory_gib=178.3,
        bandwidth=8e12,
        link=900e9,
        network=50e9,
        host_memory_gib=250,
        host_bandwidth=90e9,
        host_link=64e9,
    ),
}

SHORT_NAMES = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}
