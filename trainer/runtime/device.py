"""The device of a rank: selection, memory, RNG state and peak FLOP/s. Only this module and host_memory refer to CUDA."""

import glob
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.base.config import ConfigError
from trainer.base.config.schema.condition import Fact, Known
from trainer.base.config.schema.facts import FLOAT8_DEVICE, FLOAT8_GPU
from trainer.base.config.schema.run import DeviceChoice
from trainer.base.system import console
from trainer.base.system.process import cores, local_rank, spins
from trainer.runtime.accelerators import ACCELERATORS

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Value of a dtype setting -> torch's dtype."""


def has_gpu_driver() -> bool:
    """Return whether this process may open a GPU of NVIDIA, or with a ROCm build of torch one of AMD, and no environment variable
    hides the GPUs."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    hidden = any(os.environ.get(name) in ("", "-1") for name in names)
    # An integrated GPU of AMD has the same file, but builds for CPUs and for CUDA cannot use it.
    nodes = ["/dev/kfd"] if torch.version.hip else glob.glob("/dev/nvidia[0-9]*")
    return not hidden and any(os.access(node, os.R_OK | os.W_OK) for node in nodes)


def gpu_count() -> int:
    """Return the number of GPUs of this node."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def uses_gpus(choice: DeviceChoice) -> bool:
    """Return whether ranks of this node train on GPUs. choice: value of [run] device."""
    return choice != "cpu" and gpu_count() > 0


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def select_device(choice: DeviceChoice) -> torch.device:
    """Return the device of this rank and make it current. Raises ConfigError like `require_enough_gpus`."""
    require_enough_gpus(choice, local_world_size())
    if not uses_gpus(choice):
        return torch.device("cpu")
    if (
        not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys()
    ):  # older names of the same variable
        # Read at the first allocation. Expandable segments leave less unused memory between allocations.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def existing_device(name: str | torch.device) -> torch.device:
    """Return the device of this name, such as "cpu", "cuda" or "cuda:1". Raises ConfigError if this process has none."""
    try:
        device = torch.device(name)
        if device.type == "cpu" or (
            torch.get_device_module(device).is_available() and (device.index or 0) < gpu_count()
        ):
            return device
        problem = f"torch {torch.__version__} finds no such device"
    except (RuntimeError, AttributeError, TypeError):
        problem = 'expected "cpu", "cuda", or one of several GPUs such as "cuda:1"'
    raise ConfigError("", f"device {str(name)!r}: {problem}")


def require_enough_gpus(choice: DeviceChoice, ranks: int) -> None:
    """Raise ConfigError if this node has GPUs, but fewer GPUs than ranks, or if torch cannot use its GPUs."""
    if choice == "cpu":
        return
    if not gpu_count() and (choice == "gpu" or has_gpu_driver()):
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
        if torch.version.hip:
            build = f"built for ROCm {torch.version.hip}"
        finds = f"torch {torch.__version__} ({build}) finds no GPU"
        message = f"this node has no GPU driver, and {finds}; install a driver"
        if has_gpu_driver():
            message = f"this node has a GPU driver, but {finds}; install a build of torch for this driver"
        raise ConfigError("run.device", f"{message}, or train on the CPU with --run.device cpu")
    if 0 < gpu_count() < ranks:
        message = f"NGPU={ranks}: this node has only {gpu_count()} GPUs; reduce NGPU, or train on the CPU with --run.device cpu"
        raise ConfigError("", message)


def float8_facts(choice: DeviceChoice) -> dict[Fact, Known]:
    """Return what is known of the products in float8 of this node. Plans, which may be made on another node, have other facts."""
    on_gpu = uses_gpus(choice)
    missing = ""
    if not on_gpu:
        if torch.__version__ < (2, 13):  # It has only the slow product that float8.multiply avoids.
            missing = f"on a CPU, torch >= 2.13 has them, but {torch.__version__} is installed"
    elif torch.version.hip:
        missing = "formats of NVIDIA's GPUs (e4m3fn, e5m2) are used, which this GPU of AMD may not have"
    elif torch.cuda.get_device_capability() < (8, 9):
        missing = f"{torch.cuda.get_device_name()} has none; GPUs of NVIDIA have them since Ada and Hopper"
    return {FLOAT8_DEVICE: Known(not missing, missing), FLOAT8_GPU: Known(on_gpu)}


def communication_backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def driver_version(device: torch.device) -> str | None:
    """Return the version of the GPU driver, or None if the device is a CPU or the version is unknown."""
    if device.type != "cuda":
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak FLOP/s of matrix products in `dtype` ("bf16" or "fp32"), or None for an unknown device."""
    spec = ACCELERATORS.get(name(device))
    return spec.flops.get(dtype) if spec else None


def set_cpu_threads(threads: int) -> None:
    """Set the number of threads for CPU operators. 0 means OMP_NUM_THREADS if it is set, otherwise this rank's share of the
    cores. Raises ConfigError if there are more threads than cores, which would make each step many times slower. Warn if
    several threads would wait actively."""
    if threads > cores():
        raise ConfigError("training.cpu_threads", f"this node has only {cores()} cores")
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # further numbers are for nested parallel regions
    if not threads and chosen.isdecimal() and int(chosen):
        threads = min(int(chosen), cores())
        if threads < int(chosen):
            console.warning(
                f"OMP_NUM_THREADS={chosen}: this node has only {threads} cores, so {threads} threads are used"
            )
    threads = threads or max(1, cores() // local_world_size())
    torch.set_num_threads(threads)
    if threads > 1 and sys.platform == "linux" and spins():
        console.warning(
            "threads of OpenMP wait actively, which slows down a run beside other jobs many times; call limit_spinning before "
            "torch is imported, or set GOMP_SPINCOUNT=3000 (docs/python.md)"
        )


def is_deterministic(choice: Literal["auto", "on", "off"], device: torch.device) -> bool:
    """Return whether all algorithms are deterministic. "auto": only on a CPU."""
    return choice == "on" or (choice == "auto" and device.type == "cpu")


def set_deterministic(choice: Literal["auto", "on", "off"], device: torch.device) -> None:
    """Enable or disable deterministic algorithms."""
    on = is_deterministic(choice, device)
    if on and device.type == "cuda":
        # cuBLAS reads this variable when it creates its first handle, which is later.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)
    # Filling every new tensor with NaN would cost time in each step and does not make runs more deterministic.
    torch.utils.deterministic.fill_uninitialized_memory = False


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)


def timestamp(device: torch.device) -> Any:
    """Return a timestamp that marks when the device completes the work queued so far. The host does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two results of `timestamp`. Wait until the device has reached them."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def memory_now(device: torch.device) -> int:
    """Return the number of bytes that PyTorch has allocated on a GPU. On a CPU, return the resident bytes of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return _largest_resident()


def memory_reserved(device: torch.device) -> int | None:
    """Return the number of bytes of GPU memory that PyTorch's allocator holds, or None on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def memory_free(device: torch.device) -> int | None:
    """Return the number of bytes of GPU memory that no process uses, or None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def memory_peak(device: torch.device) -> int:
    """Return the maximum of `memory_now` since the last `reset_memory_peak` (GPU) or since the process started (CPU). On a
    CPU, it can be slightly less than `memory_now`, because the kernel counts pages in batches."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _largest_resident()


def _largest_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_memory_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def record_memory_history(enabled: bool) -> None:
    """Start or stop to record every allocation of GPU memory, with its stack."""
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def write_memory_snapshot(path: Path) -> None:
    """Write the recorded allocations to a file that https://pytorch.org/memory_viz displays."""
    torch.cuda.memory._dump_snapshot(str(path))


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this rank's default random generators as byte tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(device: torch.device, state: dict[str, Tensor]) -> None:
    """Set the states of this rank's default random generators. Generators that are missing from `state` do not change."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
