"""A step of the Engine on a GPU that does not exist: the meta device, under fake tensors.

Builds of torch for CPUs abort in autograd on fake tensors of device "cuda". The trainer distinguishes GPUs from CPUs by
`device.type != "cpu"`, so on the meta device it takes the paths of a GPU, except those of trainer/runtime that test for "cuda".
Fake tensors raise an error for an operator on tensors of several devices, and for one whose result the host reads.
Kernels, streams, pinned memory and NCCL are not simulated; scripts/dev/gpu_acceptance.sh checks them on a GPU.
"""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from models.context import Context
from trainer.batch import Batch
from trainer.engine import Engine, build_model_parts, build_objective
from trainer.parallel.activation_checkpoint import SAVEABLE_OPS
from trainer.parallel.attention import AttentionBackend, Mask
from trainer.parallel.mesh import Meshes
from trainer.run.resolve import resolve
from trainer.tools.planner.patches import FAKE_GPU_KERNELS, skip_shape_negotiation
from trainer.tools.testing.layouts import Layout, batch_settings, flags, load_layout, num_ranks

FAKE_GPU = torch.device("meta")


class _Event:
    """An event on which the host may wait, because code that computes on the CPU must wait for its input."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def record(self, stream: object = None) -> None:
        pass

    wait = synchronize = record


class _Stream:
    stream_id = device_index = device_type = 0

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _DeviceModule:
    """The functions of torch.cuda that a step uses. It has no `synchronize`, which a step must not call."""

    Event, Stream = _Event, _Stream

    def current_stream(self, device: object = None) -> _Stream:
        return _Stream()

    def stream(self, stream: _Stream) -> _Stream:
        return stream

    def device_count(self) -> int:
        return 1

    def current_device(self) -> None:
        """Return no index: "meta" and "meta:0" are different devices."""

    def set_device(self, device: object) -> None:
        pass

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True


class _CheckedMask(torch.nn.Module):
    """A mask that is computed, but not used, because flex_attention has no kernel for this device."""

    def __init__(self, mask: Mask):
        super().__init__()
        self.mask = mask

    def forward(self, context: Context) -> None:
        self.mask(context)


BACKEND = AttentionBackend(
    lambda kind, cp, by_document, dtype: _CheckedMask(Mask(kind, cp, by_document, create_block_mask)),
    FAKE_GPU_KERNELS.attention,
)


def _on_cuda(value):
    """Return a fake tensor of a GPU, whose products in float8 are checked like real ones. Return other arguments unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


class _ProductsOfGpu(TorchDispatchMode):
    """Refuse the matrix products that a GPU refuses: of several dtypes, and in float8 of certain shapes, layouts and scales. Fake
    tensors of this device accept them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._scaled_mm.default:
            assert function(*map(_on_cuda, args), **(kwargs or {})).dtype == torch.bfloat16
            return function(*args, **(kwargs or {}))
        dtypes = {tensor.dtype for tensor in args if isinstance(tensor, torch.Tensor)}
        if function in _MATRIX_PRODUCTS and len(dtypes) > 1:
            raise RuntimeError(f"{function} of {dtypes}")
        return function(*args, **(kwargs or {}))


_MATRIX_PRODUCTS = (*SAVEABLE_OPS["matmuls"], torch.ops.aten.mm.out)


def prepare_process() -> None:
    """Make the meta device usable in this process, permanently."""
    torch.meta = _DeviceModule()
    torch.accelerator.current_stream = lambda device=None: _Stream()
    torch.Tensor.record_stream = lambda tensor, stream: None
    FSDPParamGroup._validate_no_meta_params = lambda group: None


def run_step(argv: list[str], layout: str) -> str:
    """Run two steps of rank 0 in this process, each of two microbatches or of as few as a pipeline needs. Return the type of the
    device of their outcome."""
    prepare_process()
    settings = Layout.parse(layout).settings
    config = load_layout([*argv, *flags(settings)])
    batch, _ = batch_settings(config, factor=1 if config.parallel.pp > 1 else 2)
    config = load_layout([*argv, *flags(settings | batch)])
    ranks = num_ranks(config.parallel)
    resolved = resolve(config, ranks)
    dist.destroy_process_group()  # gloo, which a LocalRank has
    dist.init_process_group("cpu:fake,meta:fake", rank=0, world_size=ranks, store=FakeStore())
    meshes = Meshes(resolved.dims, FAKE_GPU, None, resolved.structure.has_experts, resolved.exchanges_matrices)
    parts = build_model_parts(config, resolved, meshes, BACKEND)
    shape = config.training.local_batch_size, config.training.seq_len
    with FakeTensorMode(allow_non_fake_inputs=True), _ProductsOfGpu():
        engine = Engine(config, resolved, FAKE_GPU, meshes, parts, build_objective(config, resolved, meshes))
        if resolved.dims.pp > 1:
            skip_shape_negotiation(engine.forward_backward.schedule)
        for _ in range(2):
            tokens = torch.zeros(shape, dtype=torch.int64, device=FAKE_GPU)
            batches = [Batch(*(tokens.clone() for _ in range(4)), samples=tokens[:, 0].clone())] * resolved.grad_accum
            result = engine.step(batches, lr=1e-4, stop=False, on_before_update=lambda: None)
    return result.outcome.device.type
