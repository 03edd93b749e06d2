"""Runs that train adapters: equal to peft, independent of the layout, saved, resumed, merged and exchanged with peft."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from models.huggingface_tensors import reorder_rows
from scripts import convert_hf
from tests import training_runs
from tests.checkpoint.test_commit import damage
from tests.end_to_end.test_security import update_manifest
from tests.training_runs import (
    checkpoint_of,
    combine,
    error_line,
    full,
    hash_of,
    in_folder,
    measured,
    recorded_batches,
    records,
    trainer_from,
)
from trainer.adapters.select import LORA_A
from trainer.base.config import CheckpointConfig, ConfigError
from trainer.base.config.exits import run_to_end
from trainer.base.config.load import load_config
from trainer.batch import IGNORE_INDEX
from trainer.checkpoint.formats.adapter import Adapter, MergedWeights
from trainer.checkpoint.formats.export import export_run, is_export_of
from trainer.checkpoint.formats.folders import open_complete, open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.formats.peft import PeftNames
from trainer.checkpoint.formats.peft_writer import write_peft
from trainer.checkpoint.tensor_files import read_index
from trainer.run.resolve import resolve
from trainer.tools.planner.simulate import simulate
from trainer.tools.testing.layouts import Layout, flags, num_ranks
from trainer.tools.testing.parity import LIMITS, deviations, within
from trainer.tools.testing.ranks import RankError

GIB = 2**30
FAMILIES = {
    "llama": [],
    "tied": ["--model.overrides.tied_embeddings", "true"],
    "qwen3": ["--model.name", "qwen3", "--model.overrides.head_dim", "16"],
    # Rows of blocks of 64 values, and a base whose scales are exact in bf16.
    "llama in 4 bits": [
        *("--model.overrides.dim", "64", "--model.overrides.hidden_dim", "128"),
        *("--training.parameter_dtype", "bf16"),
    ],
    **{
        name: ["--model.name", name, "--model.overrides.head_dim", "16", "--model.overrides.hidden_dim", "48"]
        for name in ("mixtral", "qwen3-moe", "gpt-oss")
    },
    "two-experts": [
        *("--model.name", "mixtral", "--model.overrides.head_dim", "16", "--model.overrides.hidden_dim", "256"),
        *("--model.overrides.n_experts", "2"),
    ],
    "olmoe": ["--model.name", "olmoe", "--model.overrides.head_dim", "4", "--model.overrides.hidden_dim", "48"],
    "phi": [
        *(
            "--model.name",
            "phi",
            "--model.overrides.partial_rotary_factor",
            "1",
            "--model.overrides.rope_type",
            "default",
        ),
        *("--model.overrides.rope_factor", "1", "--model.overrides.rope_original_seq_len", "4096"),
        *("--model.overrides.rope_short_factors", "", "--model.overrides.rope_long_factors", ""),
        *("--model.overrides.rope_is_long", "false"),
    ],
}
"""Models of a tiny run. Phi stores queries, keys and values as one tensor."""
# Adam's first update has the size of the learning rate even for gradients that are nearly zero. A large eps avoids that their
# rounding errors decide on its sign.
STEADY = ["--optimizer.eps", "1e-4", "--lr_schedule.warmup_steps", "0", "--lr_schedule.min_lr_ratio", "1"]
LORA = ["--lora.rank", "4", "--optimizer.lr", "1e-2", *STEADY]


def train(argv):
    return training_runs.train(combine(argv))


@pytest.fixture(scope="module")
def bases(ranks, tiny, tmp_path_factory):
    """Name of a family, number of layers -> flags of a run with a trained base model. The last one is its run folder."""
    folder, made = tmp_path_factory.mktemp("bases"), {}

    def base(family, n_layers=2):
        key, run = (family, n_layers), folder / f"{family}-{n_layers}"
        if key not in made:
            argv = [*tiny, *FAMILIES[family], "--model.overrides.n_layers", str(n_layers)]
            ranks(1).run(train, [*argv, *in_folder(run), "--training.steps", "2"])
            ranks(1).run(export_run, run, CheckpointConfig(export_huggingface=True))
            made[key] = [*argv, "--checkpoint.init_from", str(run)]
        return made[key]

    return base


# ---------------------------------------------------------------- training


def lora_steps(argv):
    """Train on this rank. Return the initial adapter, the batches, and the loss and the gradients of each step."""
    trainer = trainer_from(combine(argv))
    engine, gradients = trainer.engine, []
    initial = {name: full(p).clone() for name, p in engine.parameters.items() if p.requires_grad}
    clip = engine.optimizer.clip

    def record_and_clip(*args, **kwargs):
        gradients.append({name: engine.parameters[name].grad.clone() for name in initial})
        return clip(*args, **kwargs)

    engine.optimizer.clip = record_and_clip
    with recorded_batches() as batches:
        trainer.train()
    frozen = [name for name, p in engine.parameters.items() if not p.requires_grad and p.grad is not None]
    return initial, batches, gradients, frozen


def in_4_bits(folder):
    """Return transformers' model in fp32 with a base in 4 bits of bitsandbytes."""
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    options = {"attn_implementation": "eager", "dtype": torch.float32, "device_map": "cpu"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3", "llama in 4 bits"])
def test_losses_and_gradients_of_20_steps_equal_those_of_peft(ranks, bases, tmp_path, family):
    peft = pytest.importorskip("peft")
    argv = [
        *bases(family),
        *LORA,
        *in_folder(tmp_path / "run"),
        "--training.steps",
        "20",
        "--training.max_norm",
        "none",
    ]
    argv += ["--optimizer.weight_decay", "0.1", "--optimizer.lr", "1e-3", "--training.local_batch_size", "8"]
    argv += ["--lora.base_dtype", "nf4"] if "4 bits" in family else []
    ((initial, batches, gradients, frozen),) = ranks(1).run(lora_steps, argv)
    assert len(gradients) == 20 and not frozen
    assert {p.rpartition(".")[2] for p in initial} == {"lora_a", "lora_b"} and len(initial) == 2 * 2 * 7

    config = load_config(combine(argv))
    resolved = resolve(config, 1)
    base = Path(config.checkpoint.init_from)
    write_huggingface(open_weights(max((base / "checkpoints").iterdir()), alone=True), tmp_path / "hf", torch.float32)
    if "4 bits" in family:
        model = in_4_bits(tmp_path / "hf")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=config.lora.alpha, target_modules=modules, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings).train()  # in evaluation, bitsandbytes computes in bf16 on some CPUs
    names, own = PeftNames(resolved.spec, resolved.sizes), dict(model.named_parameters())
    keys = {name: names.stored(name).replace(".weight", ".default.weight") for name in initial}

    def in_order_of_peft(name, value):
        is_reordered = not name.endswith(LORA_A)
        return reorder_rows(names.hf, names.base(name), value, names.head_dim) if is_reordered else value

    with torch.no_grad():
        for name, key in keys.items():
            own[key].copy_(in_order_of_peft(name, initial[name]))
    trained = [p for p in own.values() if p.requires_grad]
    assert len(trained) == len(initial)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    # The loader is ahead by one microbatch.
    for batch, record, expected in zip(batches[:20], records(tmp_path / "run"), gradients, strict=True):
        logits = model(batch.tokens, position_ids=batch.positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX)
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        total = torch.stack([g.norm() for g in expected.values()]).norm()
        for name, key in keys.items():
            difference = (own[key].grad - in_order_of_peft(name, expected[name])).norm()
            assert difference <= 1e-5 * expected[name].norm().clamp(min=0.01 * total), name
        optimizer.step()


ROWS = [
    "dp_shard=2",
    "dp_replicate=2 dp_shard=2 lora.train_fully=output,*norm",
    "tp=2",
    "tp=2 sequence_parallel=false",
    "tp=2 activation_checkpoint.mode=full lora.dropout=0.3",
    "cp=2 tp=2 data.document_mask=true lora.dropout=0.3",
    "dp_shard=2 pp=2 activation_checkpoint.mode=full lora.dropout=0.3",
    "pp=2 pipeline_schedule=ZBVZeroBubble lora.targets=*.attention.w[qv]",
    "dp_shard=2 cpu_offload=true",
    "tp=2 compile.enabled=true activation_checkpoint.mode=selective lora.dropout=0.3",
    "dp_shard=2 training.parameter_dtype=bf16 training.compute_dtype=bf16 lora.rslora=true",
    "dp_shard=2 optimizer.offload=state training.parameter_dtype=bf16 lora.dtype=bf16 lora.init=gaussian",
    "tp=2 qwen3",
    "dp_shard=2 ep=2 mixtral",
    "dp_shard=2 tp=2 ep=2 mixtral",
    "pp=2 lora.rank=3 mixtral",
    "dp_shard=2 ep=2 optimizer.offload=state mixtral",
    "dp_shard=4 lora.rank=3 two-experts",  # more ranks than experts, which cannot share matrices of 3 rows
    "dp_shard=4 ep=2 lora.rank=3 optimizer.state_dtype=8bit two-experts",
    "tp=2 ep=2 lora.targets=*.w2,*.w3 activation_checkpoint.mode=full gpt-oss",
    "dp_shard=2 tp=2 phi",
]


def depth(text):
    """Return a number of layers for which every pipeline rank of a layout may have two stages."""
    return 4 if "pp=" in text else 2


@pytest.mark.parametrize("text", ROWS)
def test_adapters_have_the_losses_and_gradients_of_one_rank(ranks, bases, on_one_rank, tmp_path, text):
    if torch.__version__ < (2, 13) and "ZeroBubble" in text:
        pytest.skip("needs torch 2.13")
    last = text.split()[-1]
    family = last if last in FAMILIES else "llama"
    layout = Layout.parse(text.removesuffix(family).strip())
    argv = [*bases(family, depth(text)), *LORA, "--training.steps", "3"]
    size = num_ranks(load_config(combine([*argv, *flags(layout.settings)])).parallel)
    batch = "8" if size == 1 else "2"
    expected = on_one_rank(*argv, "--training.local_batch_size", "8", *flags(layout.single_rank_settings))
    run = measured(
        ranks, size, [*argv, "--training.local_batch_size", batch, *flags(layout.settings)], tmp_path / "run"
    )
    deviation = deviations(expected, run)
    if "bf16" in text:
        deviation["gradient"] /= 3  # of a single parameter, whose rounding errors do not cancel
    assert within(deviation, LIMITS["bf16" if "bf16" in text else "fp32"]), deviation


def test_a_frozen_base_has_no_gradient_state_or_reduction(bases):
    argv = [*bases("llama"), *LORA, "--training.local_batch_size", "4"]
    config = load_config([*argv, "--training.parameter_dtype", "bf16"])
    resolved = resolve(config, 2)
    (plan,) = simulate([(config, 0)], 2, on_gpu=False)
    num_values = sum(p.numel() for p in resolved.trained.tensors(resolved.spec.model(resolved.sizes)).values())
    assert resolved.num_trained == num_values < resolved.num_parameters
    assert plan.state_per_parameter == pytest.approx(12)
    # Gradients are reduced in fp32, padded to the same size on both ranks.
    assert plan.traffic[("fsdp", "reduce-scatter")].num_bytes == pytest.approx(4 * num_values, rel=0.05)
    assert max(plan.timeline["optimizer"]) == pytest.approx(8 * num_values / 2, rel=0.05)
    assert max(plan.timeline["parameters"]) == pytest.approx(resolved.num_parameters + 2 * num_values, rel=0.05)


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def finished(ranks, bases, tmp_path_factory):
    """Return a function (family) -> folder of a finished run, which trains norms and the output too."""
    folder, made = tmp_path_factory.mktemp("finished"), {}

    def run_once(family, *extra):
        path = folder / "-".join([family, *extra]).replace("/", "")
        if path not in made:
            argv = [*bases(family), *LORA, *extra, *in_folder(path), "--training.steps", "4"]
            made[path] = argv
            ranks(2).run(train, [*argv, "--training.local_batch_size", "4"])
        return path

    return run_once


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_bitwise(ranks, bases, tmp_path):
    argv = [*bases("llama"), *LORA, "--lora.dropout", "0.2", "--training.local_batch_size", "4"]
    complete = ranks(2).run(train, [*argv, *in_folder(tmp_path / "a"), "--training.steps", "4"])
    ranks(2).run(train, [*argv, *in_folder(tmp_path / "b"), "--training.steps", "2"])
    resumed = ranks(2).run(train, [*argv, *in_folder(tmp_path / "b"), "--training.steps", "4"])
    assert resumed[0].weights == complete[0].weights
    more = [*argv, "--training.steps", "6"]
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    on_one_rank = ranks(1).run(train, [*more, *in_folder(tmp_path / "b"), "--training.local_batch_size", "8"])
    on_two_ranks = ranks(2).run(train, [*more, *in_folder(tmp_path / "c")])
    assert len(on_one_rank[0].microbatches) == len(on_two_ranks[0].microbatches) == 2
    for one, two in zip(*(records(tmp_path / name)[-2:] for name in "bc"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    folder = checkpoint_of(tmp_path / "a")
    names = {name for name in read_index(folder) if name.startswith("model/")}
    assert all(name.endswith(("lora_a", "lora_b")) for name in names)
    num_values = resolve(load_config(argv), 1).num_trained
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12 * num_values + 10**6


def test_adapters_of_experts_resume_with_another_ep(ranks, bases, tmp_path):
    argv = [*bases("mixtral"), *LORA, "--training.local_batch_size", "4"]
    for name, steps, ep in (("a", 4, 1), ("b", 2, 2), ("b", 4, 1)):
        settings = ["--training.steps", str(steps), "--parallel.ep", str(ep), *in_folder(tmp_path / name)]
        ranks(2).run(train, [*argv, *settings])
    for one, other in zip(*(records(tmp_path / name) for name in "ab"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_the_load_of_layers_before_all_adapters_is_counted_once(ranks, bases, tmp_path):
    """Their routers have no gradient, and blocks are computed twice."""
    flags = [*bases("mixtral"), *LORA, "--training.steps", "1", "--training.local_batch_size", "4"]
    loads = []
    for name, settings in {
        "all": ["--lora.targets", "*", "--lora.train_fully", "tok_embeddings"],
        "experts": ["--lora.targets", "*.experts.*", "--activation_checkpoint.mode", "full"],
        "last": ["--lora.targets", "layers.1.*.experts.*"],
    }.items():
        ranks(2).run(train, [*flags, *settings, *in_folder(tmp_path / name)])
        (record,) = records(tmp_path / name)
        loads.append({key: value for key, value in record.items() if "expert" in key})
    assert loads[0] == loads[1] == loads[2] and loads[0]["expert_load_violation"] >= 0
    assert "idle_experts" in loads[0]


def test_another_base_model_is_refused(ranks, bases, tmp_path):
    argv = [*bases("llama"), *LORA, *in_folder(tmp_path / "run")]
    ranks(1).run(train, [*argv, "--training.steps", "2"])
    ranks(1).run(train, [*bases("llama"), *in_folder(tmp_path / "other"), "--training.steps", "3"])
    with pytest.raises(RankError, match=r"base model was .*, is .*; set another --run.name"):
        ranks(1).run(train, [*argv, "--checkpoint.init_from", str(tmp_path / "other"), "--training.steps", "4"])
    with pytest.raises(ConfigError, match=r"other.* is not the base model with which .* was trained"):
        open_weights(checkpoint_of(tmp_path / "run"), checkpoint_of(tmp_path / "other"), alone=True)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match=r'needs its base model: .*model_type "qwen3".*; use --base PATH'):
        open_weights(checkpoint_of(tmp_path / "run"), tmp_path / "hf", alone=True)


# ---------------------------------------------------------------- exchange


ROUTERS = ("--lora.train_fully", "*.router")
EXCHANGED = [
    ("llama", ()),
    ("llama", ("--lora.targets", "layers.1.*,*.wq", "--lora.rslora", "true")),
    ("llama", ("--lora.train_fully", "output,layers.1.ffn_norm")),
    ("qwen3", ()),
    ("mixtral", ("--lora.rslora", "true", *ROUTERS)),
    ("olmoe", ROUTERS),
    ("qwen3-moe", ()),
    ("phi", ()),
    ("phi", ("--lora.targets", "*.wq,*.w3", "--lora.rslora", "true")),
]


@torch.no_grad()
def merged_logits(checkpoint, tokens):
    """Load the model on this rank as scripts/generate.py does, and return its logits."""
    weights = open_weights(checkpoint)
    model = weights.spec.model(weights.sizes)
    weights.load_into(dict(model.named_parameters()))
    return model(tokens)


@pytest.mark.parametrize(("family", "extra"), EXCHANGED)
def test_merged_logits_equal_those_of_peft(ranks, finished, tmp_path, family, extra):
    peft = pytest.importorskip("peft")
    checkpoint = checkpoint_of(finished(family, *extra))
    weights = open_weights(checkpoint, alone=True)
    write_huggingface(open_weights(weights.base.folder, alone=True), tmp_path / "base", torch.float32)
    write_huggingface(open_weights(checkpoint, alone=True), tmp_path / "merged", torch.float32)
    write_peft(Adapter.open(checkpoint, alone=True), tmp_path / "peft")
    assert is_export_of(tmp_path / "peft", checkpoint, averaged=False)
    tokens = torch.arange(2, 50).view(2, 24)
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        before = base(tokens).logits
        model = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
        adapted = model(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
        (ours,) = ranks(1).run(merged_logits, checkpoint, tokens)
    assert (adapted - before).norm() > 1e-2 * before.norm()
    model.save_pretrained(tmp_path / "saved")
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "saved")]
    own, saved = ({key for key in file if ".lora_" not in key} for file in files)
    assert own == saved, "peft has all modules that are trained without an adapter"
    for logits in (merged, ours):
        assert (logits - adapted).norm() <= 1e-5 * adapted.norm()


def test_the_adapter_of_a_model_of_several_modalities_fits_its_base_in_peft(ranks, tiny, tmp_path):
    """The modules of the text model have other names there, and those of the vision tower the same last names."""
    peft = pytest.importorskip("peft")
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "vocab_size": 2048, "sliding_window": 16, "query_pre_attn_scalar": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    argv = [*tiny, "--model.huggingface", str(tmp_path / "base"), "--checkpoint.init_from", str(tmp_path / "base")]
    ranks(1).run(train, [*argv, *LORA, *in_folder(tmp_path / "run"), "--training.steps", "2"])
    checkpoint = checkpoint_of(tmp_path / "run")
    write_peft(Adapter.open(checkpoint, alone=True), tmp_path / "peft")
    write_huggingface(open_weights(checkpoint, alone=True), tmp_path / "merged", torch.float32)
    tokens = torch.arange(2, 50).view(2, 24)
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert type(base) is transformers.Gemma3ForConditionalGeneration
        before = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
        assert not any("vision" in name for name, _ in adapted.named_parameters() if "lora_" in name)
        after = adapted(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    assert (after - before).norm() > 1e-2 * before.norm()
    assert (merged - after).norm() <= 1e-5 * after.norm()
    argv = [*argv, *LORA, "--optimizer.lr", "1e-30", "--optimizer.weight_decay", "0", "--training.steps", "1"]
    ranks(1).run(train, [*argv, *in_folder(tmp_path / "next"), "--lora.init_from", str(tmp_path / "peft")])
    write_peft(Adapter.open(checkpoint_of(tmp_path / "next"), alone=True), tmp_path / "again")
    hashes = {hash_of(load_file(tmp_path / name / "adapter_model.safetensors")) for name in ("peft", "again")}
    assert len(hashes) == 1


@pytest.mark.parametrize(("family", "extra"), [*EXCHANGED[:3], ("mixtral", ROUTERS), ("olmoe", ROUTERS), EXCHANGED[-1]])
def test_a_run_continues_with_an_adapter_of_peft_or_of_another_run(ranks, bases, finished, tmp_path, family, extra):
    run = finished(family, *extra)
    write_peft(Adapter.open(checkpoint_of(run), alone=True), tmp_path / "peft")
    argv = [*bases(family), *LORA, *extra, "--optimizer.lr", "1e-30", "--training.steps", "1"]
    argv += ["--optimizer.weight_decay", "0"]
    hashes = set()
    for source in (run, tmp_path / "peft"):
        folder = tmp_path / f"from_{source.name}"
        ranks(2).run(
            train, [*argv, *in_folder(folder), "--lora.init_from", str(source), "--training.local_batch_size", "4"]
        )
        for checkpoint in (checkpoint_of(run), checkpoint_of(folder)):
            write_peft(Adapter.open(checkpoint, alone=True), tmp_path / "again")
            hashes.add(hash_of(load_file(tmp_path / "again" / "adapter_model.safetensors")))
    assert len(hashes) == 1


def line_of(monkeypatch, capsys, *argv):
    """Return the error line of scripts/convert_hf.py."""
    monkeypatch.setattr(sys, "argv", ["convert_hf.py", *map(str, argv)])
    with pytest.raises(SystemExit) as exit:
        run_to_end(convert_hf.main)
    assert exit.value.code == 2
    return capsys.readouterr().err.strip()


def test_the_command_writes_adapters_and_merged_models(monkeypatch, finished, tmp_path, capsys):
    run = finished("llama")
    for command, file in (("to-hf", "adapter_config.json"), ("merge", "model.safetensors")):
        monkeypatch.setattr(sys, "argv", ["convert_hf.py", command, str(run), str(tmp_path / command)])
        convert_hf.main()
        assert (tmp_path / command / file).exists()
    capsys.readouterr()
    base = open_weights(checkpoint_of(run), alone=True).base.folder
    line = line_of(monkeypatch, capsys, "merge", base, tmp_path / "x")
    assert line == f"{base} contains no adapter; to-hf writes the model"
    line = line_of(monkeypatch, capsys, "merge", tmp_path / "to-hf", tmp_path / "x")
    assert line.startswith(f"{tmp_path / 'to-hf'} contains an adapter of the package peft")
    for option in (("--dtype", "fp32"), ("--shard-gib", "1.0")):
        line = line_of(monkeypatch, capsys, "to-hf", run, tmp_path / "x", *option)
        reason = f"has no effect, because {checkpoint_of(run)} contains only an adapter; see merge"
        assert line == f"{' '.join(option)} {reason}"
    line = line_of(monkeypatch, capsys, "merge", run, tmp_path / "x", "--base", tmp_path / "gone")
    assert line == f"{checkpoint_of(run)} needs its base model, but {tmp_path / 'gone'} does not exist; use --base PATH"


def test_the_base_may_be_named_by_its_run_folder(bases, finished):
    checkpoint, base = checkpoint_of(finished("llama")), Path(bases("llama")[-1])
    assert open_weights(checkpoint, base, alone=True).base.folder == checkpoint_of(base)


UNSUPPORTED = {
    (
        "tied",
        "tok_embeddings",
    ): "tok_embeddings.weight is also the output weight, and peft cannot train tied embeddings",
    ("phi", "layers.0.attention.wq"): (
        "layers.0.attention.wq.weight is a part of model.layers.0.self_attn.qkv_proj.weight, and peft cannot train a part of a "
        "tensor"
    ),
}


@pytest.mark.parametrize(("family", "module"), UNSUPPORTED)
def test_parameters_that_peft_cannot_train_are_merged_but_not_exported(
    ranks, bases, finished, monkeypatch, tmp_path, capsys, family, module
):
    extra = ["--lora.targets", "*.w1", "--lora.train_fully", module]
    problem = UNSUPPORTED[family, module]
    incompatible = f"is incompatible with parameters that peft cannot train alone ({problem})"
    hint = "scripts/convert_hf.py merge writes the complete model"
    argv = combine([*bases(family), *LORA, *extra, "--checkpoint.export_huggingface", "true"])
    with pytest.raises(ConfigError) as error:  # before the run
        resolve(load_config(argv), 1)
    assert (error.value.key, error.value.message) == ("checkpoint.export_huggingface", f"{incompatible}: {hint}")
    run = finished(family, *extra)
    assert line_of(monkeypatch, capsys, "to-hf", run, tmp_path / "x") == f"{problem}; {hint}"
    monkeypatch.setattr(sys, "argv", ["convert_hf.py", "merge", str(run), str(tmp_path / "merged")])
    convert_hf.main()
    merged, source = open_complete(tmp_path / "merged", alone=True), open_weights(checkpoint_of(run), alone=True)
    assert source.adapter.trained.fully == {f"{module}.weight"}
    for name in merged.index:
        assert torch.equal(merged.rows(name), source.rows(name).bfloat16()), name
    # A folder of peft cannot contain these parameters either.
    write_peft(Adapter.open(checkpoint_of(finished("llama")), alone=True), tmp_path / "peft")
    argv = [*bases(family), *LORA, *extra, *in_folder(tmp_path / "run"), "--lora.init_from", str(tmp_path / "peft")]
    (line,) = ranks(1).run(error_line, argv)
    assert line.startswith("--lora.init_from ") and problem in line


def test_rows_of_a_peft_tensor_that_the_run_does_not_train_must_be_zero(ranks, bases, finished, tmp_path):
    (family, extra), folder = EXCHANGED[-1], tmp_path / "peft"
    write_peft(Adapter.open(checkpoint_of(finished(family, *extra)), alone=True), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"
    tensors[name][-1, 0] = 1
    save_file(tensors, folder / "adapter_model.safetensors")
    argv = [*bases(family), *LORA, *extra, *in_folder(tmp_path / "run"), "--lora.init_from", str(folder)]
    lines = ranks(2).run(error_line, [*argv, "--training.local_batch_size", "4"])
    problem = f"cannot load {folder}: {name} has nonzero rows that are not trained by this run"
    assert lines == [f"--lora.init_from {folder}: {problem}"] * 2


# ---------------------------------------------------------------- new tokens

NEW = ["<|new|>", "<|newer|>"]
GROWN = [
    *("--tokenizer.extra_special_tokens", ",".join(NEW), "--model.overrides.vocab_size", "2050"),
    *("--checkpoint.resize_embeddings", "true", "--lora.train_fully", "tok_embeddings,output"),
]


def grown_model(argv):
    """Train on this rank, and return the trained parameters by name, and the initial vocabulary."""
    trainer = trainer_from(combine(argv))
    parameters = trainer.engine.parameters
    initial = {n: full(p).clone() for n, p in parameters.items() if n in ("tok_embeddings.weight", "output.weight")}
    trainer.train()
    return {n: full(p).clone() for n, p in parameters.items() if p.requires_grad}, initial


@pytest.mark.parametrize("text", ["dp_shard=1", "dp_shard=2", "tp=2", "dp_shard=2 pp=2", "tp=2 pp=2 cpu_offload=true"])
def test_new_tokens_are_trained_as_on_one_rank(ranks, bases, on_one_rank, tmp_path, text):
    layout, base_flags = Layout.parse(text), bases("llama", depth(text))
    argv = [*base_flags, *LORA, *GROWN, "--training.steps", "3", "--training.local_batch_size"]
    size = num_ranks(load_config([*argv, "2", *flags(layout.settings)]).parallel)
    expected = on_one_rank(*argv, "8", *flags(layout.single_rank_settings))
    run = measured(ranks, size, [*argv, "2", *flags(layout.settings)], tmp_path / "run")
    assert within(deviations(expected, run), LIMITS["fp32"])
    trained, initial = {}, {}
    for of_rank, of_vocabulary in ranks(size).run(
        grown_model, [*argv, "2", *flags(layout.settings), *in_folder(tmp_path / "again"), "--training.steps", "1"]
    ):
        trained, initial = trained | of_rank, initial | of_vocabulary
    base = open_complete(checkpoint_of(Path(base_flags[-1])), alone=True)
    for name in ("tok_embeddings.weight", "output.weight"):
        stored = base.rows(name, 0, 2048)
        assert torch.equal(initial[name][:2048], stored)
        torch.testing.assert_close(
            initial[name][2048:], stored.double().mean(0).float().expand(2, -1), rtol=0, atol=1e-7
        )
        assert not torch.equal(trained[name][2048:], initial[name][2048:]), "the new rows are trained"


def test_a_run_with_new_tokens_resumes_bitwise_in_any_layout(ranks, bases, tmp_path):
    argv = [*bases("llama"), *LORA, *GROWN, "--training.local_batch_size", "4", "--checkpoint.interval_steps", "2"]
    whole = [*argv, *in_folder(tmp_path / "whole"), "--training.steps", "4"]
    expected = ranks(2).run(train, whole)[0].weights
    shutil.copytree(tmp_path / "whole", tmp_path / "tp")
    for name in ("whole", "tp"):
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000004")
    assert ranks(2).run(train, whole)[0].weights == expected
    ranks(2).run(train, [*argv, *in_folder(tmp_path / "tp"), "--training.steps", "4", "--parallel.tp", "2"])
    losses = [[r["loss"] for r in records(tmp_path / name)] for name in ("whole", "tp")]
    assert losses[1] == pytest.approx(losses[0], rel=5e-6)


def test_new_tokens_are_merged_exported_and_read_by_peft(ranks, bases, tmp_path):
    """A user loads the tokenizer of the adapter's folder, and enlarges the base model to it."""
    peft = pytest.importorskip("peft")
    argv = [*bases("llama"), *LORA, *GROWN, "--training.local_batch_size", "4"]
    ranks(2).run(train, [*argv, *in_folder(tmp_path / "run"), "--training.steps", "3"])
    checkpoint, tokens = checkpoint_of(tmp_path / "run"), torch.arange(2002, 2050).view(2, 24)
    write_huggingface(
        open_weights(open_weights(checkpoint, alone=True).base.folder, alone=True), tmp_path / "base", torch.float32
    )
    write_huggingface(open_weights(checkpoint, alone=True), tmp_path / "merged", torch.float32)
    write_peft(Adapter.open(checkpoint, alone=True), tmp_path / "peft")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "peft")
    assert tokenizer.convert_tokens_to_ids(NEW) == [2048, 2049] and len(tokenizer) == 2050
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        base.resize_token_embeddings(len(tokenizer))
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
        (ours,) = ranks(1).run(merged_logits, checkpoint, tokens)
    for logits in (merged, ours):
        assert logits.shape[-1] == 2050 and (logits - adapted).norm() <= 1e-5 * adapted.norm()
    # Another run continues with the adapter, in both formats.
    for name in ("run", "peft"):
        extra = ["--lora.init_from", str(tmp_path / name), "--optimizer.lr", "1e-30", "--training.steps", "1"]
        folder = tmp_path / f"from_{name}"
        ranks(2).run(train, [*argv, *extra, *in_folder(folder), "--optimizer.weight_decay", "0"])
        write_peft(Adapter.open(checkpoint_of(folder), alone=True), tmp_path / "again")
        first, again = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("peft", "again"))
        assert hash_of(first) == hash_of(again)


def test_tied_new_tokens_are_merged(ranks, bases, tmp_path):
    argv = [*bases("tied"), *LORA, *GROWN, "--training.local_batch_size", "4", "--lora.train_fully", "tok_embeddings"]
    ranks(2).run(train, [*argv, *in_folder(tmp_path / "run"), "--training.steps", "2", "--parallel.tp", "2"])
    checkpoint, tokens = checkpoint_of(tmp_path / "run"), torch.arange(2002, 2050).view(2, 24)
    write_huggingface(open_weights(checkpoint, alone=True), tmp_path / "merged", torch.float32)
    with torch.no_grad():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
        (ours,) = ranks(1).run(merged_logits, checkpoint, tokens)
    assert merged.shape[-1] == 2050 and (ours - merged).norm() <= 1e-5 * merged.norm()


# ---------------------------------------------------------------- errors

MISTAKES = {
    ("--lora.rank", "0"): "--lora.rank 0: must be at least 1",
    ("--lora.targets", "*.wx"): "--lora.targets *.wx: *.wx matches no linear module of the blocks",
    (
        "--lora.targets",
        "q_proj",
    ): "--lora.targets q_proj: q_proj matches no linear module of the blocks; q_proj is called *.attention.wq here",
    (
        "--lora.targets",
        "*experts*",
    ): "--lora.targets *experts*: *experts* matches no linear module of the blocks",
    ("--lora.targets", "output"): "--lora.targets output: output matches no linear module of the blocks",
    ("--lora.targets", ""): "--lora.targets : is empty, so the run would train nothing; see also [lora] train_fully",
    ("--lora.train_fully", "*.wq"): (
        "--lora.train_fully *.wq: layers.0.attention.wq has an adapter ([lora] targets), so it cannot be trained fully"
    ),
    ("--lora.train_fully", "embedding"): "--lora.train_fully embedding: embedding matches no module with parameters",
    ("--lora.init_from", "/no/such"): "--lora.init_from /no/such: no such folder",
    ("--lora.init_from", "{run}", "--lora.rank", "8"): "--lora.rank 8: must be 4, as in the adapter {checkpoint}",
    (
        "--lora.init_from",
        "{run}",
        "--lora.targets",
        "*.wq",
    ): "--lora.init_from {run}: cannot load {checkpoint}: layers.",
    ("--lora.init_from", "{peft}", "--lora.alpha", "8"): "--lora.alpha 8: must be 32.0, as in the adapter {peft}",
    ("--lora.init_from", "{shape}"): (
        "--lora.init_from {shape}: cannot load {shape}: base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has shape "
        "[4, 3], expected [4, 64]"
    ),
    (
        "--lora.init_from",
        "{text_rank}",
    ): '--lora.init_from {text_rank}: {text_rank}: adapter_config.json: r "4" must be a number',
    ("--lora.init_from", "{dora}"): "--lora.init_from {dora}: {dora}: adapter_config.json: use_dora true must be false",
    ("--lora.init_from", "{stacks}"): (
        '--lora.init_from {stacks}: {stacks}: adapter_config.json: target_parameters ["mlp.experts.down_proj"]: adapters of '
        "stacked experts in this form cannot be continued; merge them in peft (merge_and_unload), and use the model as a base"
    ),
    ("--lora.init_from", "{base}"): (
        "--lora.init_from {base}: {base_checkpoint} contains no adapter, but is the checkpoint of a complete model; use it as "
        "checkpoint.init_from"
    ),
    ("--lora.init_from", "{linked}"): (
        "--lora.init_from {linked}: {linked}: adapter_model.safetensors is a symbolic link to a path outside the folder"
    ),
    ("--lora.init_from", "{linked_config}"): (
        "--lora.init_from {linked_config}: {linked_config}: adapter_config.json is a symbolic link to a path outside the folder"
    ),
    (
        "--lora.init_from",
        "{rankless}",
    ): "--lora.init_from {rankless}: {rankless}: model.json does not describe an adapter",
    (
        "--lora.init_from",
        "{unknown_base}",
    ): "--lora.init_from {unknown_base}: {unknown_base}: model.json does not describe an adapter",
    (
        "--lora.init_from",
        "{damaged}",
    ): "--lora.init_from {damaged}: {damaged}: rank-00000.safetensors does not match its hash",
}


@pytest.fixture(scope="module")
def places(finished, bases, tmp_path_factory):
    """Folders that MISTAKES names."""
    folder, run = tmp_path_factory.mktemp("places"), finished("llama")
    places = {"run": run, "checkpoint": checkpoint_of(run), "base": Path(bases("llama")[-1])}
    places |= {
        name: folder / name
        for name in (
            "peft",
            "shape",
            "dora",
            "stacks",
            "damaged",
            "linked",
            "linked_config",
            "rankless",
            "text_rank",
            "unknown_base",
        )
    }
    places["base_checkpoint"] = checkpoint_of(places["base"])
    for name in ("peft", "shape", "dora", "stacks", "text_rank", "linked", "linked_config"):
        write_peft(Adapter.open(places["checkpoint"], alone=True), places[name])
    for name, file in (("linked", "adapter_model.safetensors"), ("linked_config", "adapter_config.json")):
        (places[name] / file).unlink()
        (places[name] / file).symlink_to(places["peft"] / file)
    tensors = load_file(places["shape"] / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] = torch.zeros(4, 3)
    save_file(tensors, places["shape"] / "adapter_model.safetensors")
    for name, change in (
        ("dora", {"use_dora": True}),
        ("stacks", {"target_parameters": ["mlp.experts.down_proj"]}),
        ("text_rank", {"r": "4"}),
    ):
        config = json.loads((places[name] / "adapter_config.json").read_text()) | change
        (places[name] / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(places["checkpoint"], places["damaged"])
    damage(places["damaged"])
    for name, change in (("rankless", {"rank": None}), ("unknown_base", {"base_dtype": "nf3"})):
        shutil.copytree(places["checkpoint"], places[name])
        file = places[name] / "model.json"
        model = json.loads(file.read_text())
        lora = {key: value for key, value in (model["lora"] | change).items() if value is not None}
        file.write_text(json.dumps(model | {"lora": lora}))
        update_manifest(places[name])
    return places


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_one_line(ranks, bases, places, tmp_path, mistake):
    words = [word.format(**places) for word in mistake]
    argv = [*bases("llama"), *LORA, *in_folder(tmp_path / "run"), "--training.steps", "1", *words]
    (line,) = ranks(1).run(error_line, argv)
    assert line.startswith(MISTAKES[mistake].format(**places)) and "\n" not in line


def test_every_pipeline_rank_must_train_a_parameter(bases):
    argv = combine([*bases("llama", 4), *LORA, "--parallel.pp", "2", "--lora.targets", "layers.3.*"])
    message = r"rank 0 of the pipeline \(layers.0, layers.1, tok_embeddings\) would have no trained parameter"
    with pytest.raises(ConfigError, match=message):
        resolve(load_config(argv), 2)
    resolve(load_config([*argv, "--lora.train_fully", "tok_embeddings"]), 2)


def test_a_merged_model_is_not_rounded_to_the_dtype_of_the_base(bases, finished, tmp_path):
    """The fp32 export of a merged bf16 base has the fp32 sum of base and adapter."""
    checkpoint = checkpoint_of(finished("llama"))
    weights = open_weights(checkpoint, alone=True)
    write_huggingface(open_weights(weights.base.folder, alone=True), tmp_path / "base", torch.bfloat16)
    base = open_complete(tmp_path / "base", alone=True)
    weights = MergedWeights.of(weights.adapter, base, into_quantized=False)
    name = "layers.0.attention.wq.weight"
    merged = weights.rows(name, 0, 8)
    expected = base.rows(name, 0, 8).float() + weights.adapter.product(name, slice(0, 8), slice(None))
    assert torch.equal(merged, expected) and not torch.equal(merged, merged.bfloat16().float())


def test_an_adapter_is_no_initial_model(ranks, bases, finished, tmp_path):
    run = finished("llama")
    argv = [*bases("llama"), *in_folder(tmp_path / "run"), "--checkpoint.init_from", str(run)]
    (line,) = ranks(1).run(error_line, argv)
    assert (
        f"{checkpoint_of(run)} contains only an adapter; write a complete model (scripts/convert_hf.py merge " in line
    )
    assert line.endswith(f"--lora.init_from {checkpoint_of(run)}")
