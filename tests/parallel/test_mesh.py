import pytest
import torch
import torch.distributed as dist

from trainer.base.config import ConfigError, ParallelConfig
from trainer.parallel.mesh import Meshes, ParallelDims


def test_dp_shard_defaults_to_all_remaining_ranks():
    dims = ParallelDims.from_config(ParallelConfig(dp_replicate=2), world_size=8)
    assert (dims.dp_shard, dims.fsdp, dims.batch) == (4, 4, 8)
    assert dims.pp * dims.dp_replicate * dims.dp_shard * dims.cp * dims.tp == dims.world_size == 8


@pytest.mark.parametrize("world_size", range(1, 65))
def test_degrees_whose_product_is_not_the_world_size_are_rejected(world_size):
    for replicate in range(1, 9):
        for shard in (-1, *range(1, 9)):
            fits = world_size % replicate == 0 if shard == -1 else replicate * shard == world_size
            config = ParallelConfig(dp_replicate=replicate, dp_shard=shard)
            if fits:
                dims = ParallelDims.from_config(config, world_size)
                assert dims.dp_replicate * dims.dp_shard == world_size
            else:
                with pytest.raises(ConfigError):
                    ParallelDims.from_config(config, world_size)


def axes():
    meshes = Meshes(ParallelDims.from_config(ParallelConfig(dp_replicate=2), world_size=4), torch.device("cpu"))
    sizes = [{n: mesh[n].size() for n in mesh.mesh_dim_names} for mesh in (meshes.model, meshes.data, meshes.loss)]
    model = meshes.model
    return sizes, (
        model["dp_replicate"].get_local_rank(),
        model["fsdp"].get_local_rank(),
        meshes.data["batch"].get_local_rank(),
    )


def test_size_one_axes_exist(ranks):
    results = ranks(4).run(axes)
    for sizes, _ in results:
        assert sizes == [
            {"pp": 1, "dp_replicate": 2, "fsdp": 2, "tp": 1},
            {"pp": 1, "batch": 4, "cp": 1, "tp": 1},
            {"pp": 1, "loss": 4, "tp": 1},
        ]
    assert [coordinates for _, coordinates in results] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]


def num_groups(config):
    Meshes(ParallelDims.from_config(config, world_size=4), torch.device("cpu"))
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (ParallelConfig(), {"all ranks", "one rank"}),
        (ParallelConfig(tp=4), {"all ranks", "one rank"}),
        (ParallelConfig(cp=4), {"all ranks", "one rank", "cp"}),  # whose exchanges must not wait for FSDP
        (ParallelConfig(tp=2), {"all ranks", "one rank", "fsdp", "batch", "loss", "tp"}),
        (ParallelConfig(pp=2, cp=2), {"all ranks", "one rank", "pp", "fsdp", "cp", "loss"}),
    ],
)
def test_axes_of_one_name_and_all_axes_of_one_rank_share_a_process_group(ranks, config, groups):
    assert ranks(4).run(num_groups, config) == [len(groups)] * 4


def groups_of_experts():
    meshes = Meshes(ParallelDims.from_config(ParallelConfig(ep=4), 4), torch.device("cpu"), has_experts=True)
    return meshes.experts["ep"].get_group() is dist.group.WORLD, meshes.model["fsdp"].get_group() is dist.group.WORLD


def test_experts_on_all_ranks_have_a_group_of_their_own(ranks):
    assert ranks(4).run(groups_of_experts) == [(False, True)] * 4
