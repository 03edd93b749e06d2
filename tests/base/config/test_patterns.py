"""Patterns of names that match nothing: what was probably meant."""

import pytest

from trainer.base.config import ConfigError
from trainer.base.config.patterns import matching

MODULES = ["layers.0.attention.wq", "layers.0.feed_forward.w1", "output"]
PARAMETERS = [f"{name}.weight" for name in MODULES]


@pytest.mark.parametrize(
    ("pattern", "names", "hint"),
    [
        ("layers.0.attention.wp", MODULES, "; did you mean 'layers.0.attention.wq'?"),
        ("wq", MODULES, "; write *.wq"),
        ("layers.0.attention", MODULES, "; write layers.0.attention.*"),
        ("all-linear", MODULES, "; all-linear is called * here"),
        ("q_proj", MODULES, "; q_proj is called *.attention.wq here"),
        ("*.gate_proj", MODULES, "; *.gate_proj is called *.w1 here"),
        ("lm_head", PARAMETERS, "; lm_head is called output.* here"),
        ("lm_head.*", PARAMETERS, "; lm_head.* is called output.* here"),
        ("embed_tokens", ["output"], "; embed_tokens is called tok_embeddings here, which is frozen"),
        ("model.layers.0.self_attn.q_proj.weight", PARAMETERS, " is called layers.0.*attention.wq.* here"),
        ("model.layers.0.mlp.gate_proj", MODULES, " is called layers.0.*w1 here"),
        ("o_proj", MODULES, ""),  # this model has none
        ("norm", MODULES, "; norm is frozen"),
        ("*.xyz", MODULES, ""),
    ],
)
def test_an_error_says_what_was_probably_meant(pattern, names, hint):
    with pytest.raises(ConfigError) as error:
        matching("lora.targets", [pattern], names, "module", {"norm": "is frozen", "tok_embeddings": "is frozen"})
    assert error.value.key == "lora.targets"
    assert error.value.message.startswith(f"{pattern} matches no module")
    assert error.value.message.endswith(hint) and (hint or error.value.message.endswith("module"))


def test_names_keep_their_order():
    assert matching("lora.targets", ["output", "*.w?"], MODULES, "module") == MODULES
