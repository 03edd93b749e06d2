"""Which dims of a parameter grow with the width of the model, in every family."""

import pytest
import torch

from models import MODELS
from models.spec import SizeError
from models.width import width_role


@pytest.mark.parametrize("family", [name for name, spec in MODELS.items() if "debug" in spec.by_size])
def test_all_matrices_are_hidden_but_embedding_output_and_routers(family):
    spec = MODELS[family]
    with torch.device("meta"):
        model = spec.model(spec.by_size["debug"])
    roles = {name: width_role(model, name) for name, _ in model.named_parameters()}
    assert roles.pop("tok_embeddings.weight") == ("scaled_input" if family.startswith("gemma") else "input")
    # A shared matrix has the name of the embedding only, and base_width is refused.
    assert roles.pop("output.weight", "output") == "output"
    for name, parameter in model.named_parameters():
        is_stacked_bias = ".experts.b" in name
        if name.endswith(("router.weight", "shared_gate.weight", "kda.f_a.weight", "kda.g_a.weight")):
            assert roles.pop(name) == "output"
        elif name.endswith(("kda.f_b.weight", "kda.g_b.weight")):
            assert roles.pop(name) == "widening"
        elif name in roles:
            is_vector = parameter.dim() == 1 or is_stacked_bias or name.endswith("_filter")
            assert roles.pop(name) == ("vector" if is_vector else "hidden"), name
    assert not roles


def test_a_wider_model_has_more_heads_of_the_same_width_and_wider_layers():
    sizes = MODELS["llama3"].by_size["debug"]
    assert sizes.of_width(512) == {"dim": 512, "n_heads": 32, "n_kv_heads": 16, "hidden_dim": 1408}
    with pytest.raises(SizeError, match="n_kv_heads 4 x 16 / dim 128 must be an integer"):
        sizes.of_width(16)
    wide = MODELS["deepseek-v3"].by_size["debug"].of_width(256)
    assert (wide["expert_hidden_dim"], wide["q_lora_rank"], wide["kv_lora_rank"]) == (192, 96, 64)
