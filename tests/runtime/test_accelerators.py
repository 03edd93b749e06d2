import pytest

from trainer.base.config import ConfigError
from trainer.runtime.accelerators import ACCELERATORS, SHORT_NAMES, short_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((name, name) for name in SHORT_NAMES),
        *((full, name) for name, full in SHORT_NAMES.items()),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("GeForce RTX 3090", "rtx3090"),
        ("RTX A6000", "a6000"),
        ("RTX 6000 Ada", "rtx6000-ada"),
        ("A100-80GB", "a100"),
        ("H100 SXM", "h100"),
        ("mi300X", "mi300x"),
        ("CPU", "cpu"),
    ],
)
def test_a_device_is_found_by_its_short_its_full_and_its_common_names(text, name):
    assert short_name("--device", text, others=("cpu",)) == name


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("l4s", "; did you mean 'l40s'?"),
        ("a600", "; did you mean 'a6000'?"),
        ("rtx 409", "; did you mean 'rtx4090'?"),
        ("mi300", "; did you mean 'mi300x'?"),
        ("tpu", ""),
        ("", ""),
    ],
)
def test_an_unknown_device_is_one_line_with_the_nearest_name(text, hint):
    with pytest.raises(ConfigError) as error:
        short_name("--device", text)
    assert str(error.value) == f"--device {text}: expected one of {', '.join(SHORT_NAMES)}{hint}"


@pytest.mark.parametrize("name", ACCELERATORS)
def test_the_figures_of_a_device_have_a_source_and_the_units_of_the_table(name):
    spec = ACCELERATORS[name]
    assert len(spec.source) > 20 and set(spec.flops) - {"fp8"} == {"bf16", "fp32"}
    assert 1.95 < spec.flops.get("fp8", 2 * spec.flops["bf16"]) / spec.flops["bf16"] < 2.05
    assert 5e13 < spec.flops["bf16"] < 1e16 and spec.flops["fp32"] < spec.flops["bf16"]
    assert 1e11 < spec.memory_bandwidth < 1e13 and 20 < spec.memory_gib < 300
    assert spec.inter_node_bandwidth <= spec.intra_node_bandwidth <= spec.memory_bandwidth
