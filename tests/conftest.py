import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.faults.harness import CONFIG, write_corpus
from tests.object_stores import s3_server
from trainer.tools.testing.ranks import LocalRanks

ROOT = Path(__file__).parent.parent

# The suite draws the same random input each time; `pytest tests/fuzz --hypothesis-profile=long` draws much more of it.
_CHECKS = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "short", max_examples=50, deadline=None, suppress_health_check=_CHECKS, derandomize=True
)
hypothesis.settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=_CHECKS)
hypothesis.settings.load_profile("short")

# What a process inherits, and every process that a test starts: `nohup` ignores SIGHUP, a background job of a shell SIGINT
# and SIGQUIT. scripts/run_tests.sh empties the environment.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.umask(0o022)


COMPLETE_ONLY = (
    *("end_to_end", "faults", "fuzz", "scripts", "slurm", "test_python_page.py"),  # complete runs and commands
    *("tools/planner", "tools/test_dry_run.py", "tools/report/test_plan.py"),  # simulated steps
    *("run/sinks/test_services.py", "checkpoint/formats/test_tokenizer_files.py"),  # other programs
)
"""Folders and files that --quick leaves out. It also leaves out tests that start ranks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out complete runs, commands and whatever starts ranks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    left_out = [ROOT / "tests" / name for name in COMPLETE_ONLY]

    def is_quick(item: pytest.Item) -> bool:
        return "ranks" not in item.fixturenames and not any(item.path.is_relative_to(path) for path in left_out)

    config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
    items[:] = filter(is_quick, items)


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], LocalRanks]:
    """ranks(n).run(function, ...) calls a function on n gloo ranks and returns their results."""
    return LocalRanks


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of 200 short text files."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), 200)


def tiny_run(tmp_path_factory, corpus: Path, global_batch_size: int) -> list[str]:
    """Return the command-line arguments of a run that takes a second: two layers, sequences of 32 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    settings = {"steps": 4, "interval_steps": 0, "global_batch_size": global_batch_size, "stores": folder / "stores"}
    # On a busy machine, any rank may be a straggler, and its warning would be one that a test does not expect.
    no_warning = '[resilience]\nstraggler_ratio = "none"\n'
    (folder / "tiny.toml").write_text(CONFIG.format(corpus=corpus, **settings) + no_warning)
    return ["--config", str(folder / "tiny.toml")]


@pytest.fixture(scope="session")
def tiny(corpus, tmp_path_factory) -> list[str]:
    """Command-line arguments of a tiny run with a global batch of 8."""
    return tiny_run(tmp_path_factory, corpus, 8)


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory) -> Path:
    """A folder with a small Llama model, saved by transformers in several files."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, rms_norm_eps=1e-5, max_position_embeddings=64, rope_theta=500_000.0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hf_model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200KB")
    return folder


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket of a real S3 server, whose address and credentials are in the environment."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    with s3_server() as url:
        yield url
