"""The device of a rank."""

import pytest
import torch
from torch.torch_version import TorchVersion

from trainer.base.config import ConfigError
from trainer.base.config.schema.condition import Known
from trainer.base.config.schema.facts import FLOAT8_DEVICE, FLOAT8_GPU
from trainer.runtime import device as devices


def test_a_node_without_gpus_uses_its_cpu(monkeypatch):
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    monkeypatch.setattr(devices, "has_gpu_driver", lambda: False)
    assert devices.select_device("auto") == torch.device("cpu")
    assert devices.communication_backend(torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(("choice", "driver"), [("auto", True), ("gpu", True), ("gpu", False)])
def test_a_gpu_that_torch_cannot_use_is_an_error(monkeypatch, choice, driver):
    """Otherwise a large model would train on the CPU, because the driver is too old or torch is built for CPUs."""
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    monkeypatch.setattr(devices, "has_gpu_driver", lambda: driver)
    with pytest.raises(ConfigError) as error:
        devices.select_device(choice)
    assert error.value.message.startswith(f"this node has {'a' if driver else 'no'} GPU driver, ")
    assert error.value.message.endswith(
        f"finds no GPU; install {'a build of torch for this' if driver else 'a'} driver, "
        "or train on the CPU with --run.device cpu"
    )
    assert devices.select_device("cpu") == torch.device("cpu")


def test_hidden_gpus_are_no_driver(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: ["/dev/null"])
    assert devices.has_gpu_driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not devices.has_gpu_driver()


def test_more_ranks_than_gpus_are_rejected(monkeypatch):
    monkeypatch.setattr(devices, "gpu_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError) as error:
        devices.select_device("auto")
    assert error.value.message == (
        "NGPU=4: this node has only 2 GPUs; reduce NGPU, or train on the CPU with --run.device cpu"
    )
    assert devices.select_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpu", "found", "missing"),
    [
        ((9, 0), {}, ""),
        (
            (9, 0),
            {"hip": "7.0"},
            "formats of NVIDIA's GPUs (e4m3fn, e5m2) are used, which this GPU of AMD may not have",
        ),
        ((8, 0), {}, "A100 has none; GPUs of NVIDIA have them since Ada and Hopper"),
        (None, {}, ""),
        (None, {"torch": "2.11.0"}, "on a CPU, torch >= 2.13 has them, but 2.11.0 is installed"),
    ],
)
def test_what_is_known_of_products_in_float8(monkeypatch, gpu, found, missing):
    monkeypatch.setattr(devices, "gpu_count", lambda: int(gpu is not None))
    monkeypatch.setattr(torch.version, "hip", found.get("hip"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch, "__version__", TorchVersion(found.get("torch", "2.13.0")))
    known = devices.float8_facts("auto")
    assert known == {FLOAT8_DEVICE: Known(not missing, missing), FLOAT8_GPU: Known(gpu is not None)}


def test_peak_flops_are_looked_up_by_the_full_device_name(monkeypatch):
    for name, peak in {
        "NVIDIA H200": 989.4e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA H300": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    }.items():
        monkeypatch.setattr(devices, "name", lambda device, name=name: name)
        assert devices.peak_flops(torch.device("cpu"), "bf16") == peak


def test_cores_are_divided_among_the_ranks_of_a_node(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(devices, "cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        devices.set_cpu_threads(0)
        assert torch.get_num_threads() == 4
        devices.set_cpu_threads(3)
        assert torch.get_num_threads() == 3
        with pytest.raises(ConfigError, match=r"training.cpu_threads: this node has only 8 cores"):
            devices.set_cpu_threads(9)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("threads", "spin_count", "warns"), [(2, None, True), (2, "3000", False), (1, None, False)])
def test_several_threads_that_wait_actively_are_a_warning(monkeypatch, capsys, threads, spin_count, warns):
    """A run that is started from Python may import torch before anything limits its threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(devices, "cores", lambda: 8)
    for name, value in {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": spin_count}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    try:
        devices.set_cpu_threads(threads)
        assert ("set GOMP_SPINCOUNT=3000 (docs/python.md)" in capsys.readouterr().err) == warns
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("variable", "setting", "threads", "warning"),
    [
        ("3", 0, 3, ""),
        ("3", 2, 2, ""),
        ("3,2", 0, 3, ""),
        ("0", 0, 4, ""),
        ("64", 0, 8, "OMP_NUM_THREADS=64: this node has only 8 cores, so 8 threads are used"),
    ],
)
def test_omp_num_threads_is_respected_unless_the_setting_is_set(
    monkeypatch, capsys, variable, setting, threads, warning
):
    before = torch.get_num_threads()
    monkeypatch.setattr(devices, "cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    try:
        devices.set_cpu_threads(setting)
        assert torch.get_num_threads() == threads
        assert warning in capsys.readouterr().err
    finally:
        torch.set_num_threads(before)


def test_rng_state_is_restored():
    state = devices.rng_state(torch.device("cpu"))
    first = torch.rand(4)
    devices.set_rng_state(torch.device("cpu"), {})
    assert not torch.equal(torch.rand(4), first)
    devices.set_rng_state(torch.device("cpu"), state)
    assert torch.equal(torch.rand(4), first)
