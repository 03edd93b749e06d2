"""What a recording consists of: allocations, points in a step, and the traffic of collectives."""

from dataclasses import dataclass

MEMORY_CATEGORIES = (
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    "unsharded parameters",
    "communication",
    "temporaries",
)
"""gradients: before and after reduction. activations: tensors that forward saves for backward. unsharded parameters: all-gathered
parameters. communication: buffers of collectives. temporaries: all other tensors, including recomputed activations."""


@dataclass(slots=True)
class Allocation:
    """Memory of a storage, from its allocation to its release."""

    num_bytes: int
    born: int
    """Index of the event that allocated the memory, or -1 if it was allocated before the recording."""
    module: str
    """Name of the module that allocated the memory."""
    in_backward: bool
    category: str = ""
    """Category that was set explicitly. If it is empty, `final_category` derives a category from the use of the memory."""
    sent: bool = False
    """Whether a collective has read or written the memory."""
    between_stages: bool = False
    """Whether stages of a pipeline have sent or received the memory."""
    host: bool = False
    """Whether the storage is in host memory. Host memory and device memory are counted separately."""
    died: int | None = None
    """Index of the event that released the memory, or None if it was never released."""
    died_in_backward: bool = False

    def final_category(self) -> str:
        if self.category:
            return self.category
        if not self.in_backward and self.died_in_backward:
            return "activations"
        return "communication" if self.sent else "temporaries"


@dataclass(frozen=True)
class ExecutionPoint:
    """A point in a step: forward or backward of a module, outside modules in a pipeline's schedule, or the optimizer update."""

    module: str
    in_backward: bool
    in_schedule: bool = False

    def __str__(self) -> str:
        if self.module:
            return f"{'backward' if self.in_backward else 'forward'} of {self.module}"
        if self.in_backward:
            return "the start of backward"
        return "the pipeline's schedule, outside blocks" if self.in_schedule else "the update"


@dataclass
class Traffic:
    """Number and total size of all calls of one collective over one process group."""

    count: float = 0
    num_bytes: float = 0
    """Number of bytes of the full tensors: the outputs of gathers and the inputs of reductions."""
