import pytest
import torch.distributed as dist

from trainer.config import ConfigError
from trainer.runtime.distributed import once_per_node, require_agreement, run_on_rank_0
from trainer.testing.ranks import RankError


def worked():
    calls = []

    def work():
        calls.append(1)
        return f"by rank {dist.get_rank()}"

    return [once_per_node(work) for _ in range(2)], len(calls)


def test_work_is_done_once_on_a_machine_and_known_to_all_its_ranks(ranks):
    assert ranks(2).run(worked) == [(["by rank 0"] * 2, 2), (["by rank 0"] * 2, 0)]


def refused():
    def work():
        raise ConfigError("run.name", f"not by rank {dist.get_rank()}")

    try:
        run_on_rank_0(work)
    except ConfigError as error:
        return error.key, error.message


def test_what_rank_0_refuses_is_refused_on_all(ranks):
    assert ranks(2).run(refused) == [("run.name", "not by rank 0")] * 2


def agreed(differ):
    require_agreement({"a": 1, "b": dist.get_rank() if differ else 0})


def test_ranks_that_differ_are_told_how(ranks):
    ranks(2).run(agreed, False)
    with pytest.raises(RankError, match="the ranks were not started alike: b is 0 on rank 0, 1 on rank 1"):
        ranks(2).run(agreed, True)
