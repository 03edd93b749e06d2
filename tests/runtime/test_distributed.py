"""Collectives outside the step."""

import logging

import pytest
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.utils import cpp_extension

from trainer.base.config import ConfigError
from trainer.runtime import distributed
from trainer.runtime.distributed import is_peer_loss, once_per_node, require_agreement, run_on_rank_0
from trainer.tools.testing.ranks import RankError


def call_once_per_node_twice():
    calls = []

    def work():
        calls.append(1)
        return f"by rank {dist.get_rank()}"

    return [once_per_node(work) for _ in range(2)], len(calls)


def test_work_runs_once_per_node_and_its_result_reaches_all_ranks_of_the_node(ranks):
    assert ranks(2).run(call_once_per_node_twice) == [(["by rank 0"] * 2, 2), (["by rank 0"] * 2, 0)]


def error_of_rank_0():
    def work():
        raise ConfigError("run.name", f"not by rank {dist.get_rank()}")

    try:
        run_on_rank_0(work)
    except ConfigError as error:
        return error.key, error.message


def test_a_config_error_on_rank_0_is_raised_on_all_ranks(ranks):
    assert ranks(2).run(error_of_rank_0) == [("run.name", "not by rank 0")] * 2


def require_same_values(differ):
    require_agreement({"a": 1, "b": dist.get_rank() if differ else 0})


def test_differing_values_of_ranks_are_reported(ranks):
    ranks(2).run(require_same_values, False)
    with pytest.raises(RankError, match="ranks were launched with different settings: b is 0 on rank 0, 1 on rank 1"):
        ranks(2).run(require_same_values, True)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234", True),
        (
            "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
            True,
        ),
        ("NCCL communicator was aborted on rank 1.", True),
        ("NCCL error: ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_only_errors_that_another_rank_caused_are_a_lost_connection(text, lost):
    assert is_peer_loss(RuntimeError(text)) == lost


class Ended(Exception):
    pass


@pytest.mark.parametrize(
    "error", [RuntimeError("[gloo] Connection closed by peer"), dist.DistNetworkError("connection reset")]
)
def test_a_rank_that_lost_another_may_be_ended_before_it_reports_the_loss(monkeypatch, capsys, error):
    """The launcher ends it after a signal to all ranks."""

    def end(_):
        raise Ended

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed.time, "sleep", end)
    with pytest.raises(Ended):
        distributed.report_failure(error)
    assert capsys.readouterr() == ("", "")


def loggers_that_warn():
    """Return the names of torch's loggers of needless advice that would still warn."""
    loggers = _redistribute.logger, cpp_extension.logger
    return [logger.name for logger in loggers if logger.isEnabledFor(logging.WARNING)]


def test_torch_gives_no_needless_advice_on_ranks(ranks):
    assert ranks(1).run(loggers_that_warn) == [[]]
