"""Planned memory of a run, from the planner's simulation of a step."""

from dataclasses import dataclass

from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.base.system.run_files import CONFIG_FILE
from trainer.base.system.units import GIB
from trainer.tools.report.run import Run


@dataclass(frozen=True)
class Plan:
    peak_gib: float
    """Largest planned memory of the simulated ranks."""
    by_category: dict[str, float]
    """Category, such as parameters -> GiB at the peak."""
    peak_at: str
    """What the step does at the peak."""
    is_gpu: bool


def plan_memory(run: Run) -> Plan | str:
    """Simulate a step of the run for its hardware. Return the reason instead if this is impossible, for example because the run
    is of an earlier version with other settings."""
    from trainer.runtime.accelerators import ACCELERATORS
    from trainer.tools.planner.estimate import Hardware, estimate

    try:
        config = load_config(["--config", str(run.folder / CONFIG_FILE)], check_files=())
        is_gpu = run.environment.get("device") != "CPU"
        # Rates of the device have no influence on memory, so any device with all precisions will do.
        hardware = Hardware(run.world_size, ACCELERATORS["NVIDIA H100 80GB HBM3"], is_gpu)
        largest = estimate(config, hardware).largest
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{CONFIG_FILE}: {error.strerror}"
    by_category = {name: num_bytes / GIB for name, num_bytes in largest.by_category.items() if num_bytes}
    return Plan(largest.peak / GIB, by_category, str(largest.peak_at), is_gpu)
