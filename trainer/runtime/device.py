"""The device of a rank: its choice, memory, random state and peak speed. The only file that says "cuda"."""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.config import ConfigError
from trainer.runtime.accelerators import ACCELERATORS
from trainer.system.process import cores, local_rank

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Words of settings -> precisions."""


def count() -> int:
    """GPUs of this machine; 0 where it has none."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def select_device(choice: Literal["auto", "cpu"]) -> torch.device:
    """The device of this rank, made current. Raises ConfigError where there are more ranks than GPUs."""
    require_enough(choice, local_world_size())
    if choice == "cpu" or not count():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def require_enough(choice: Literal["auto", "cpu"], ranks: int) -> None:
    """Raises ConfigError where this machine has GPUs, but fewer than ranks."""
    if choice != "cpu" and 0 < count() < ranks:
        raise ConfigError("", f"NGPU={ranks}: this machine has {count()} GPUs; --run.device cpu uses none")


def parameter_device(device: torch.device, offloaded: bool) -> torch.device:
    """Where parameters live: offloaded, in host memory."""
    return torch.device("cpu") if offloaded else device


def communication_backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak FLOP/s of matrix products in dtype ("bf16", "fp32"), or None where no figure is known."""
    board = ACCELERATORS.get(name(device))
    return board.flops.get(dtype) if board else None


def set_cpu_threads(threads: int) -> None:
    """threads: of operators on the CPU; 0: this rank's share of the cores."""
    torch.set_num_threads(threads or max(1, cores() // local_world_size()))


def set_deterministic(choice: Literal["auto", "on", "off"], device: torch.device) -> bool:
    """Returns whether runs now repeat bit by bit."""
    on = choice == "on" or (choice == "auto" and device.type == "cpu")
    if on and device.type == "cuda":
        # cuBLAS reads it when its first handle is made, which is after this.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)
    # It would write NaN over every fresh tensor: a cost per step, and no help to repetition.
    torch.utils.deterministic.fill_uninitialized_memory = False
    return on


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class IntervalTimer:
    """Times of a stretch of the device's work; taking them waits for nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.unread: list[tuple[Any, Any]] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        start = self._mark()
        yield
        self.unread.append((start, self._mark()))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def shortest_s(self) -> float:
        """Of the laps since the last call, 0 if there were none. The device must have done them."""
        laps, self.unread = self.unread, []
        if self.device.type != "cuda":
            return min((end - start for start, end in laps), default=0.0)
        return min((start.elapsed_time(end) / 1000 for start, end in laps), default=0.0)


def memory_now(device: torch.device) -> int:
    """Bytes that are allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    return _largest_resident()


def memory_free(device: torch.device) -> int | None:
    """Bytes of a GPU that nobody has; None for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def memory_peak(device: torch.device) -> int:
    """Largest memory_now: since the last reset_memory_peak on a GPU, since the start of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(_largest_resident(), memory_now(device))  # the kernel's record of the largest lags behind


def _largest_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_memory_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def async_read(tensor: Tensor) -> Callable[[], list]:
    """Begin to bring a small tensor to the host; what is returned waits for that alone, not for what the device was told
    since."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def read() -> list:
        done.synchronize()
        return host.tolist()

    return read


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of this rank's default generators, as byte tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    """state: as random_state gave it; what is not in it stays as it is."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
