"""Folders in Hugging Face's format of every family: read, written, and read by transformers."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models import MODELS
from models.config_json import text_config
from models.huggingface_config import read_sizes, write_config
from models.huggingface_tensors import join_tensors
from tests.models.families import CASES, SEQ, config_of, hf_model_of, inputs
from trainer.base.config import ConfigError, ModelConfig
from trainer.checkpoint.formats.folders import open_complete, open_weights
from trainer.checkpoint.formats.huggingface import HuggingFaceWeights
from trainer.checkpoint.formats.huggingface_writer import exported_bytes, write_huggingface
from trainer.checkpoint.formats.native_writer import write_checkpoint
from trainer.checkpoint.formats.peft import PeftNames
from trainer.run.resolve import resolve_model
from trainer.tools.testing.transformers_model import stored_tensors

GIB = 2**30
_GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.6, "transformers_version": "5.0.0"}


ALL_TYPES = [
    name
    for spec in reversed(MODELS.values())
    for name in (spec.huggingface.model_type, *spec.huggingface.other_model_types)
]
"""Types of models that are read."""


def tensors_of(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize(("family", "index"), CASES)
def test_a_folder_round_trips_and_loads_in_transformers(family, index, tmp_path):
    original = hf_model_of(family, index)
    original.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(_GENERATION))
    folder = HuggingFaceWeights.open(tmp_path / "in")
    assert folder.spec.huggingface is MODELS[family].huggingface
    write_checkpoint(folder, tmp_path / "ours", 2**14)
    write_huggingface(open_weights(tmp_path / "ours", alone=True), tmp_path / "out", torch.float32, 2**14)

    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    if family == "kimi-linear":  # transformers writes dense layers with the name of mixtures, and reads both
        dense = [name.replace(".mlp.", ".block_sparse_moe.") for name in after if ".mlp." in name]
        before |= {name.replace(".block_sparse_moe.", ".mlp."): before.pop(name) for name in dense}
    if family == "olmo-hybrid":  # and a norm of layers with attention with the name of another
        later = [name for name in after if "post_attention_layernorm" in name]
        before |= {n: before.pop(n.replace("post_attention_layernorm", "feedforward_layer_norm")) for n in later}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == _GENERATION
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **eager)
    assert type(again) is type(original)
    assert again.config.eos_token_id == [2, 3]
    again.config._experts_implementation = "eager"  # as that of the original
    tokens = inputs()[0]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_model_of_a_model_of_several_modalities_is_read(prefix, tmp_path):
    """The tensors of the vision tower are not read. In old files, the name of the text model comes first."""
    text = config_of("gemma3", 0)
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    original = hf_model_of("gemma3", 0)
    stored = {name: t.clone() for name, t in original.state_dict().items() if name != "lm_head.weight"}
    nested = {
        f"{prefix}{name if prefix == 'language_model.' else name.removeprefix('model.')}": t
        for name, t in stored.items()
    }
    nested |= {"vision_tower.layer.weight": torch.ones(3), "multi_modal_projector.weight": torch.ones(2)}
    (tmp_path / "in").mkdir()
    save_file(nested, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    source = HuggingFaceWeights.open(tmp_path / "in", alone=True)
    assert source.files() == "model.safetensors; not multi_modal_projector, vision_tower"
    write_checkpoint(source, tmp_path / "ours")
    write_huggingface(open_weights(tmp_path / "ours", alone=True), tmp_path / "out", torch.float32)
    written = tensors_of(tmp_path / "out")
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = inputs()[0]
    assert torch.equal(again(tokens).logits, original(tokens).logits)


def test_the_vision_part_of_qwen3_5_is_named(tmp_path):
    """As published: model.visual and mtp stand beside the text model."""
    original = hf_model_of("qwen3.5", 1)
    stored = {
        name.replace("model.", "model.language_model.", 1): t.clone() for name, t in original.state_dict().items()
    }
    others = {"model.visual.blocks.0.norm1.weight": torch.ones(3)} | prediction_layer_of("qwen3.5", 1)
    save_file(stored | others, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_5", "text_config": config_of("qwen3.5", 1)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = HuggingFaceWeights.open(tmp_path, alone=True)
    assert source.files() == "model.safetensors; not model.visual"
    name = "layers.1.delta_net.wk.weight"
    joined = original.model.layers[1].linear_attn.in_proj_qkv.weight
    first = source.sizes.linear_num_key_heads * source.sizes.linear_key_head_dim
    assert torch.equal(source.rows(name), joined[first : 2 * first])
    assert torch.equal(source.rows("layers.4.projection.weight"), others["mtp.fc.weight"])


def prediction_layer_of(family, index):
    """Return random tensors of a layer for multi-token prediction, named as in the published files. Its attention and experts
    have the shapes of the last layer with attention."""
    model, generator = hf_model_of(family, index), torch.Generator().manual_seed(0)
    stored = stored_tensors(model, model.state_dict())
    layers, dim = model.config.num_hidden_layers, model.config.hidden_size
    last = max(i for i in range(layers) if any(f"layers.{i}.self_attn." in name for name in stored))
    of_layer = [name for name in stored if name.startswith(f"model.layers.{last}.")]
    is_qwen = family.startswith("qwen")
    prefix = "mtp.layers.0." if is_qwen else f"model.layers.{layers}."
    shapes = {prefix + name.removeprefix(f"model.layers.{last}."): stored[name].shape for name in of_layer}
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    names = names if is_qwen else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    outer = "mtp." if is_qwen else prefix
    sizes = [(dim,), (dim,), (dim, 2 * dim), (dim,)]
    shapes |= {f"{outer}{name}.weight": shape for name, shape in zip(names, sizes, strict=True)}
    tensors = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    if not is_qwen:  # each layer repeats the matrices that it shares
        tensors[f"{prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    return tensors


@pytest.mark.parametrize("family", ["deepseek-v3", "glm-4.5", "qwen3-next", "qwen3.5"])
def test_a_layer_for_multi_token_prediction_round_trips_in_the_names_of_the_family(family, tmp_path):
    hf_model_of(family, 0).save_pretrained(tmp_path / "in")
    if not family.startswith("qwen"):
        config = config_of(family, 0) | {"num_nextn_predict_layers": 1, "num_mtp_layers": 1}
        (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "in" / "model.safetensors"
    stored = load_file(file) | prediction_layer_of(family, 0)
    save_file(stored, file, {"format": "pt"})
    source = HuggingFaceWeights.open(tmp_path / "in", alone=True)
    assert source.sizes.prediction_layers == 1
    assert not source.ignored
    write_checkpoint(source, tmp_path / "ours")
    write_huggingface(open_weights(tmp_path / "ours", alone=True), tmp_path / "out", torch.float32)
    written = tensors_of(tmp_path / "out")
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)
    again = open_complete(tmp_path / "out", alone=True)
    assert again.sizes == source.sizes


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_the_tensors_decide_whether_there_are_layers_for_multi_token_prediction(key, tmp_path):
    """transformers does not write them, but their number."""
    hf_model_of("deepseek-v3", 0).save_pretrained(tmp_path)
    config = config_of("deepseek-v3", 0) | {"num_nextn_predict_layers": None, key: 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_complete(tmp_path, alone=True).sizes.prediction_layers is None
    tensors, layer = load_file(tmp_path / "model.safetensors"), prediction_layer_of("deepseek-v3", 0)
    save_file(tensors | layer, tmp_path / "model.safetensors")
    source = open_complete(tmp_path, alone=True)
    assert source.files() == "model.safetensors"
    correction = source.rows("layers.1.feed_forward.router.correction", 0, 8)
    assert torch.equal(correction, tensors["model.layers.1.mlp.gate.e_score_correction_bias"])
    for number in (0, 2):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: number}))
        message = f"config.json has {key} {number}, but the files have 1 layer for multi-token prediction"
        with pytest.raises(ConfigError, match=message):
            HuggingFaceWeights.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors | dict(list(layer.items())[3:]), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"cannot load .*: model\.layers\.4\.\S+ is missing"):
        HuggingFaceWeights.open(tmp_path)
    name = "model.layers.4.shared_head.head.weight"
    message = f"{name} differs from lm_head.weight: such prediction layers are not supported"
    for copy in (layer[name] + 1, layer[name][:-1].clone(), layer[name][:0].clone(), layer[name][0, 0].clone()):
        save_file(tensors | layer | {name: copy}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            HuggingFaceWeights.open(tmp_path)


def test_tensors_of_a_prediction_layer_are_named_as_in_the_files(tmp_path):
    hf_model_of("qwen3.5", 0).save_pretrained(tmp_path)
    tensors, layer = load_file(tmp_path / "model.safetensors"), prediction_layer_of("qwen3.5", 0)
    projection = layer.pop("mtp.fc.weight")
    save_file(tensors | layer, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"cannot load .*: mtp\.fc\.weight is missing"):
        HuggingFaceWeights.open(tmp_path)
    save_file(tensors | layer | {"model.layers.4.eh_proj.weight": projection}, tmp_path / "model.safetensors")
    remark = r"mtp\.fc\.weight, which is called model\.layers\.4\.eh_proj\.weight, is not a parameter of this model"
    with pytest.raises(ConfigError, match=rf"{remark}; mtp\.fc\.weight is missing"):
        HuggingFaceWeights.open(tmp_path)


def test_an_export_in_bf16_keeps_the_correction_of_routers_exact(tmp_path):
    hf_model_of("deepseek-v3", 0).save_pretrained(tmp_path / "in")
    write_checkpoint(HuggingFaceWeights.open(tmp_path / "in"), tmp_path / "ours")
    weights = open_weights(tmp_path / "ours", alone=True)
    write_huggingface(weights, tmp_path / "out", torch.bfloat16)
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {key for key, t in after.items() if t.dtype != torch.bfloat16} == {
        key for key in after if key.endswith("e_score_correction_bias")
    }
    assert torch.equal(before[name], after[name])
    assert exported_bytes(weights, torch.bfloat16) == sum(t.nbytes for t in after.values())


REFUSED = [
    ("deepseek-v3", "n_group", 3, "n_group 3 must divide n_routed_experts 8"),
    (
        *("deepseek-v3", "num_experts_per_tok", 5),
        "num_experts_per_tok 5 must be at most 4, the number of experts in topk_group 2 groups",
    ),
    (
        *("deepseek-v3", "first_k_dense_replace", 4),
        "first_k_dense_replace 4 must be below num_hidden_layers 4: without experts it is a dense model",
    ),
    ("deepseek-v3", "head_dim", 4, "head_dim 4 must be qk_rope_head_dim 8"),
    (
        *("deepseek-v3", "num_local_experts", 4),
        "n_routed_experts 8 and num_local_experts 4 must be equal: they are the same setting",
    ),
    ("mixtral", "num_experts", "x", 'num_local_experts 4 and num_experts "x" must be equal: they are the same setting'),
    ("deepseek-v3", "num_nextn_predict_layers", -1, "num_nextn_predict_layers -1 must be an integer from 0"),
    *(
        (
            *("gemma3", "rope_parameters", {"full_attention": {}, "sliding_attention": sliding}),
            f"sliding_attention {text}: this model supports only the {only} in layers with a window",
        )
        for sliding, text, only in (
            ({"type": "linear", "factor": 8.0}, '{"type": "linear", "factor": 8.0}', "rope_type default"),
            ({"rope_type": "linear", "factor": 8.0}, '{"rope_type": "linear", "factor": 8.0}', "rope_type default"),
            ({"partial_rotary_factor": 0.5}, '{"partial_rotary_factor": 0.5}', "partial_rotary_factor 1.0"),
        )
    ),
    (
        *("qwen3-moe", "decoder_sparse_step", 5),
        "mlp_only_layers [] and decoder_sparse_step 5 must leave a layer with experts: without experts it is a dense model",
    ),
    (
        *("gpt-oss", "rope_parameters", {"full_attention": {}, "sliding_attention": {}}),
        "rope_parameters full_attention: all layers of this model have the same positional encoding",
    ),
    ("gpt-oss", "sliding_window", None, 'layer_types "sliding_attention": this model has no sliding_window'),
    ("olmoe", "layer_types", ["sliding_attention"] * 4, 'layer_types "sliding_attention": this model has no sliding_window'),
    *(
        (
            *(family, "per_layer_config", {"0": {"num_experts": 2}}),
            'per_layer_config {"0": {"num_experts": 2}}: this model supports no sizes of single layers',
        )
        for family in ("qwen3-moe", "mistral")
    ),
    *(
        (family, "partial_rotary_factor", 0.5, "partial_rotary_factor 0.5: this model supports only 1.0")
        for family in ("olmoe", "qwen3")
    ),
    (
        *("olmo3", "rope_parameters", {"rope_type": "yarn"}),
        'rope_parameters {"rope_type": "yarn"}: must describe full_attention and sliding_attention',
    ),
    (
        *("olmo3", "rope_parameters", {"full_attention": {"rope_theta": 1e6}}),
        "rope_theta 1000000.0: transformers gives layers with a window 500000.0, and this model supports only one rope_theta for "
        "all layers",
    ),
    (
        *("olmo3", "rope_parameters", {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}),
        "rope_theta 1000000.0: sliding_attention has 10000.0, and this model supports only one rope_theta for all layers",
    ),
    ("deepseek-v3", "topk_method", "greedy", 'topk_method "greedy": this model supports only "noaux_tc"'),
    ("deepseek-v3", "first_k_dense_replace", -1, "first_k_dense_replace -1 must be an integer from 0"),
    (
        *("deepseek-v3", "num_key_value_heads", 2),
        "num_key_value_heads 2 must be num_attention_heads 4: each head has its own keys and values",
    ),
    (
        *("deepseek-v3", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        'rope_type "linear": this model supports only default and yarn',
    ),
    ("gemma2", "use_bidirectional_attention", True, "use_bidirectional_attention true: this model supports only false"),
    ("gemma3", "final_logit_softcapping", 30.0, "final_logit_softcapping 30.0: this model supports only null"),
    ("gemma3", "hidden_activation", "gelu", 'hidden_activation "gelu": this model supports only "gelu_pytorch_tanh"'),
    ("granite3", "mlp_bias", True, "mlp_bias true: this model supports only false"),
    (
        *("qwen3", "layer_types", ["linear_attention"] * 4),
        'layer_types "linear_attention": this model supports only full_attention and sliding_attention',
    ),
    (
        *("olmo3", "layer_types", ["full_attention"]),
        "layer_types must have one value for each of the 4 layers, instead of a list of length 1",
    ),
    *(
        (
            *(family, "layer_types", types),
            'layer_types "full_attention": all layers of this model have the sliding_window',
        )
        for family, types in (("mistral", ["sliding_attention", "full_attention"] * 2), ("phi", ["full_attention"] * 4))
    ),
    (
        *("olmo2", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}),
        'rope_type "dynamic": this model supports only default, linear, llama3, yarn and longrope',
    ),
    (
        *("phi", "rope_parameters", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        "short_factor must have 5 values, one for each pair of rotated dims",
    ),
    ("ministral3", "rope_parameters", {"rope_type": "default"}, "llama_4_scaling_beta is missing"),
    ("ministral3", "rope_parameters", {"llama_4_scaling_beta": 0.1}, "original_max_position_embeddings is missing"),
    (
        *("mistral", "model_type", "jamba"),
        f'model_type "jamba": expected one of {", ".join(dict.fromkeys(ALL_TYPES))}',
    ),
    ("mistral", "sliding_window", 0, "sliding_window 0 must be an integer from 1 to 2**24 or null"),
    (
        *("smollm3", "no_rope_layers", [1, 1]),
        "no_rope_layers must have one value for each of the 4 layers, instead of a list of length 2",
    ),
    (
        *("smollm3", "no_rope_layers", "1100"),
        'no_rope_layers must have one value for each of the 4 layers, instead of "1100"',
    ),
    ("smollm3", "no_rope_layers", [1, 0, "x", 2], 'no_rope_layers "x": each value must be 0 or 1'),
]  # fmt: skip


@pytest.mark.parametrize(("family", "key", "value", "problem"), REFUSED)
def test_an_unsupported_configuration_is_refused_with_the_field_at_fault(family, key, value, problem, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(family, 0) | {key: value}))
    with pytest.raises(ConfigError) as error:
        HuggingFaceWeights.open(tmp_path)
    assert str(error.value) == f"{tmp_path}/config.json: {problem}"


@pytest.mark.parametrize(
    ("family", "key", "alias", "value", "problem"),
    [
        ("olmoe", "num_experts", "num_local_experts", "x", 'num_local_experts "x" must be an integer from 1 to 2**24'),
        ("olmoe", "num_experts", "num_local_experts", 1, "num_experts_per_tok 2 must be at most num_local_experts 1"),
        (
            *("olmo3", "rope_parameters", "rope_theta", 1e6),  # a file of transformers 4
            "rope_theta 1000000.0: transformers gives layers with a window 500000.0, and this model supports only one rope_theta "
            "for all layers",
        ),
        (
            "deepseek-v3",
            "num_nextn_predict_layers",
            "num_mtp_layers",
            -1,
            "num_mtp_layers -1 must be an integer from 0",
        ),
    ],
)
def test_an_error_names_the_key_that_the_file_has(family, key, alias, value, problem, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(family, 0) | {key: None, alias: value}))
    with pytest.raises(ConfigError) as error:
        HuggingFaceWeights.open(tmp_path)
    assert str(error.value) == f"{tmp_path}/config.json: {problem}"


ROUTER, EXPERT = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "config", "problem"),
    [
        ({}, {"num_experts": 5}, "config.json has num_experts 5, but the files have 4 experts in each layer"),
        (
            *({}, {"num_experts": None, "num_local_experts": 3}),
            "config.json has num_local_experts 3, but the files have 4 experts in each layer",
        ),
        (
            *({}, {"num_experts": None}),
            "config.json has no num_experts, whose default is 64, but the files have 4 experts in each layer",
        ),
        ({EXPERT: None}, {}, f"{EXPERT} is missing"),
        ({EXPERT: torch.ones(5, 7)}, {}, f"{EXPERT} has shape [5, 7], expected [56, 40]"),
        ({ROUTER: torch.ones(3, 7)}, {}, f"{ROUTER} has shape [3, 7], expected [4, 40]"),
        ({ROUTER: None}, {}, f"{ROUTER} is missing"),
    ],
)
def test_experts_that_contradict_the_config_are_refused(tensors, config, problem, tmp_path):
    hf_model_of("olmoe", 0).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors") | tensors
    save_file({name: t for name, t in stored.items() if t is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_of("olmoe", 0) | config))
    with pytest.raises(ConfigError) as error:
        HuggingFaceWeights.open(tmp_path)
    assert str(error.value).startswith(f"cannot load {tmp_path}: {problem}") and "\n" not in str(error.value)


def test_a_folder_or_its_configuration_replaces_name_and_size(tmp_path):
    hf_model_of("gemma3", 0).save_pretrained(tmp_path / "in")
    sizes = HuggingFaceWeights.open(tmp_path / "in").sizes
    for path in (tmp_path / "in", tmp_path / "in" / "config.json"):
        assert resolve_model(ModelConfig(huggingface=str(path))) == ("gemma3", sizes)
    changed = ModelConfig(huggingface=str(tmp_path / "in"), overrides={"n_layers": 2, "window": 5})
    assert resolve_model(changed) == ("gemma3", dataclasses.replace(sizes, n_layers=2, window=5))


def test_a_published_size_is_recognized(tmp_path):
    spec = MODELS["llama3.1"]
    config = write_config(spec.huggingface, spec.by_size["8b"], 8192)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_model(ModelConfig(huggingface=str(tmp_path))) == ("llama3.1", spec.by_size["8b"])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file or folder"),
        ("{", "{folder}/config.json is not a JSON object"),
        ('{"model_type": "llama"}', "{folder}/config.json: hidden_size is missing"),
    ],
)
def test_an_unreadable_configuration_is_one_line(tmp_path, content, problem):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        resolve_model(ModelConfig(huggingface=str(tmp_path / "config.json")))
    assert str(error.value) == f"model.huggingface: {problem.format(folder=tmp_path)}"


ALL_SIZES = [(family, size) for family, spec in MODELS.items() for size in spec.by_size]


@pytest.mark.parametrize(("family", "size"), ALL_SIZES)
def test_every_size_round_trips_through_the_configuration(family, size):
    hf, sizes = MODELS[family].huggingface, MODELS[family].by_size[size]
    if family.startswith("llama") and sizes.rope_factor == 1:
        sizes = dataclasses.replace(sizes, original_seq_len=8192)  # it has no effect
    config = json.loads(json.dumps(write_config(hf, sizes, 2048)))
    assert read_sizes(hf, config) == sizes
    changed = getattr(transformers, hf.architecture).config_class(**config)
    assert read_sizes(hf, json.loads(changed.to_json_string(use_diff=False))) == sizes


EXPORTED = ["phi", "smollm3", "gemma2", "olmo3"]


@pytest.mark.parametrize("family", EXPORTED)
def test_a_debug_size_exports_a_model_that_transformers_computes(family, tmp_path):
    """Without windows, and with a vocabulary below transformers' default of pad_token_id."""
    spec = MODELS[family]
    sizes = spec.by_size["debug"]
    if family in ("gemma2", "olmo3"):
        sizes = dataclasses.replace(sizes, window=None, layer_types=("full",))
    model, (tokens, *rest) = spec.model(sizes.for_seq_len(SEQ)), inputs()
    config = write_config(spec.huggingface, sizes, 64) | {"pad_token_id": None}
    other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    other.load_state_dict(join_tensors(spec.huggingface, parameters, sizes.head_dim), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, *rest), other(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_peft_trains_the_other_parameters_of_a_model_with_experts(family):
    names = PeftNames(MODELS[family], MODELS[family].by_size["debug"])
    assert names.unsupported(["layers.0.attention.wq.weight", "layers.0.feed_forward.router.weight"]) == ""
    stack = "layers.0.feed_forward.experts.w1"
    problem = "contains the matrices of all experts, and peft cannot train them fully"
    assert names.unsupported([stack]) == f"{stack} {problem}"


ATTENTION, EXPERTS = "layers.0.attention.wq.weight", "layers.{}.feed_forward.experts.{}"


@pytest.mark.parametrize(
    ("family", "adapted", "problem"),
    [
        ("mixtral", [ATTENTION], ""),
        ("gpt-oss", [ATTENTION], ""),
        ("qwen3-moe", [EXPERTS.format(i, w) for i in range(4) for w in ("w1", "w2", "w3")], ""),
        (
            "olmoe",
            [EXPERTS.format(0, "w2")],
            f"{EXPERTS.format(0, 'w1')} has no adapters, but {EXPERTS.format(0, 'w2')} has, and peft can only adapt all matrices "
            "of all experts",
        ),
        (
            "gpt-oss",
            [EXPERTS.format(0, "w1")],
            f"{EXPERTS.format(0, 'w1')} has adapters, and those of experts of GptOssForCausalLM are not written in peft's format",
        ),
        (
            "deepseek-v3",
            ["layers.0.feed_forward.w1.weight"],
            "layers.0.feed_forward.w1.weight has an adapter, but peft takes gate_proj for a matrix of experts",
        ),
    ],
)
def test_adapters_that_peft_cannot_load_are_refused(family, adapted, problem):
    names = PeftNames(MODELS[family], MODELS[family].by_size["debug"])
    assert names.unsupported_adapters(adapted) == problem


def test_the_outer_setting_decides_whether_weights_are_tied():
    inner = config_of("mistral", 0) | {"tie_word_embeddings": False}
    for outer, expected in ((True, True), (False, False), (None, False)):
        config = {"model_type": "mistral3", "text_config": inner, "tie_word_embeddings": outer}
        assert read_sizes(MODELS["mistral"].huggingface, text_config(config)).tied_embeddings == expected
