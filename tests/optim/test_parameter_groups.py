"""Parameter groups: which options a parameter gets, and the lines about wrong ones."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from trainer.base.config import ConfigError, OptimizerConfig
from trainer.base.config.load import load_config
from trainer.base.config.render import to_toml
from trainer.base.config.toml_text import toml_value
from trainer.optim.optimizer import optimizer_class
from trainer.optim.parameter_groups import resolve_groups
from trainer.optim.rules import RULES
from trainer.run.notes import width_transfer
from trainer.run.resolve import resolve

DEBUG = ["--data.dataset", "python_stdlib"]


def groups_of(groups, *argv):
    """Return (pattern, lr, decay, names) of each group of a debug model. groups: pattern -> options, or their text."""
    texts = {p: options if isinstance(options, str) else toml_value(options) for p, options in groups.items()}
    flags = [word for pattern, text in texts.items() for word in (f"--optimizer.groups.{pattern}", text)]
    return [
        (g.pattern, g.lr, g.weight_decay, g.names)
        for g in resolve(load_config([*DEBUG, *flags, *argv]), 1).optimizer.groups
    ]


@pytest.mark.parametrize("only_matrices", [False, True])
def test_a_new_rule_updates_what_its_entry_says(only_matrices):
    trained = {"layers.0.wq.weight": torch.empty(4, 4), "norm.weight": torch.empty(4)}
    with mock.patch.dict(RULES, {"new": replace(RULES["adamw"], only_matrices=only_matrices)}):
        groups = resolve_groups(OptimizerConfig(name="new"), trained, matrices=["layers.0.wq.weight"])
    rules = {name: group.rule for group in groups for name in group.names}
    assert rules == {"layers.0.wq.weight": "new", "norm.weight": "adamw" if only_matrices else "new"}


def test_by_default_matrices_decay_and_norms_and_biases_do_not():
    found = groups_of({}, "--model.name", "qwen2.5", "--model.overrides.n_layers", "1")
    decays = {name: decay for _, _, decay, names in found for name in names}
    assert decays["layers.0.attention.wq.weight"] == decays["tok_embeddings.weight"] == 0.1
    assert decays["layers.0.attention.wq.bias"] == decays["norm.weight"] == 0.0


def test_stacked_biases_of_experts_do_not_decay():
    found = groups_of({}, "--model.name", "gpt-oss")
    decays = {name: decay for _, _, decay, names in found for name in names}
    assert (decays["layers.0.feed_forward.experts.w1"], decays["layers.0.feed_forward.experts.b1"]) == (0.1, 0.0)


def test_the_first_matching_pattern_counts_and_every_parameter_is_in_one_group():
    patterns = {"*.wo.weight": {"lr": 2}, "layers.0.*": {"lr": 0.5, "decay": 0.3}, "*": {"lr": 3, "decay": 0}}
    found = groups_of(patterns, "--model.overrides.n_layers", "2")
    names = [name for *_, names in found for name in names]
    assert sorted(names) == sorted(resolve(load_config([*DEBUG, "--model.overrides.n_layers", "2"]), 1).saved_names)
    assert found[0] == ("*.wo.weight", 2.0, 0.1, ("layers.0.attention.wo.weight", "layers.1.attention.wo.weight"))
    assert found[1][:3] == ("layers.0.*", 0.5, 0.3) and "layers.0.attention_norm.weight" in found[1][3]
    assert found[2][:3] == ("*", 3.0, 0.0) and len(found) == 3


def test_a_shared_parameter_is_in_one_group_and_its_second_name_is_an_error():
    tied = ["--model.overrides.tied_embeddings", "true"]
    found = groups_of({"tok_embeddings.*": {"lr": 0.3}}, *tied)
    assert found[0] == ("tok_embeddings.*", 0.3, 0.1, ("tok_embeddings.weight",))
    assert not any("output.weight" in names for *_, names in found)
    with pytest.raises(ConfigError, match=r"matches no trained parameter; output.weight is tok_embeddings.weight"):
        groups_of({"output.*": {"lr": 0.3}}, *tied)


MUON = ["--optimizer.name", "muon"]
LORA = ["--lora.rank", "4", "--checkpoint.init_from", "."]


def test_lora_plus_is_a_group(hf_model):
    found = groups_of({"*.lora_b": {"lr": 16}}, *LORA)
    assert found[0][1:3] == (16.0, 0.1) and all(name.endswith("lora_b") for name in found[0][3])
    assert found[1][1] == 1.0 and all(name.endswith("lora_a") for name in found[1][3])


EXPECTED = "expected a table with one or more of lr, decay, optimizer"
WRONG = {
    "": EXPECTED,
    "2": EXPECTED,
    "{}": EXPECTED,
    "{ lr = 2, lr = 3 }": EXPECTED,
    "{ lr = 2 } and": EXPECTED,
    "lr=2 lr=3": EXPECTED,
    "{ lrr = 2 }": "lrr: expected one of lr, decay, optimizer; did you mean 'lr'?",
    "lrr=2": "lrr: expected one of lr, decay, optimizer; did you mean 'lr'?",
    "{ lr = 'fast' }": 'lr = "fast": expected a number',
    "lr=fast": 'lr = "fast": expected a number',
    "{ lr = 0 }": "lr = 0: must be at least 1e-06",
    "{ lr = nan }": "lr = nan: must be finite",
    "{ lr = 1e7 }": "lr = 10000000.0: must be at most 1000000.0",
    "{ decay = -1 }": "decay = -1: must be at least 0",
    "{ optimizer = 'adam' }": "optimizer = \"adam\": expected one of adamw, muon; did you mean 'adamw'?",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_options_are_one_line(text, capsys):
    with pytest.raises(ConfigError) as failure:
        groups_of({"*": text})
    assert str(failure.value) == f"--optimizer.groups.* {text}: {WRONG[text]}"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("pattern, hint", {"nrm.weight": "; did you mean 'norm.weight'?", "nothing": ""}.items())
def test_a_pattern_that_matches_nothing_is_an_error(pattern, hint):
    with pytest.raises(ConfigError) as failure:
        groups_of({pattern: {"lr": 2}})
    assert str(failure.value) == f"optimizer.groups.{pattern}: {pattern} matches no trained parameter{hint}"


OLD = {
    "lr=0.3 decay=0": "{ lr = 0.3, decay = 0.0 }",
    " decay=1e-2  lr=.5": "{ decay = 0.01, lr = 0.5 }",
    "optimizer=adamw": '{ optimizer = "adamw" }',
}


@pytest.mark.parametrize("old", OLD)
def test_the_text_of_earlier_versions_is_read_with_a_warning(tmp_path, capsys, old):
    """Also in the config.toml of a run: what is written then is the table, and is read without a warning."""
    path, argv = tmp_path / "config.toml", ["--config", str(tmp_path / "config.toml")]
    path.write_text(
        f'[data]\ndataset = "python_stdlib"\n[optimizer]\nname = "muon"\ngroups = {{ "*.wo.weight" = "{old}" }}\n'
    )
    config = load_config(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f'warning: "{old}" is the form of the version before; write {OLD[old]}')
    path.write_text(to_toml(config))
    assert f'groups = {{ "*.wo.weight" = {OLD[old]} }}' in path.read_text()
    again = load_config(argv)
    assert (again, capsys.readouterr().err) == (config, "")
    assert resolve(again, 1).optimizer.groups == resolve(config, 1).optimizer.groups


def test_a_pattern_that_has_no_effect_is_an_error():
    with pytest.raises(ConfigError, match=r"has no effect: earlier patterns select all .*, such as \* tok_embeddings"):
        groups_of({"*": {"lr": 2}, "tok_embeddings.*": {"lr": 0.3}})


WITHOUT_EFFECT = {
    ("*.wo.weight", '{ lr = 0.5, optimizer = "adamw" }', ""): (
        "optimizer.groups.*.wo.weight: optimizer = adamw has no effect: it updates these parameters anyway"
    ),
    ("output.*", '{ optimizer = "adamw" }', "--optimizer.name muon"): (
        "optimizer.groups.output.*: optimizer = adamw has no effect: it updates these parameters anyway"
    ),
}


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_a_rule_that_changes_nothing_is_an_error(case):
    pattern, text, argv = case
    with pytest.raises(ConfigError) as failure:
        groups_of({pattern: text}, *argv.split())
    assert str(failure.value) == WITHOUT_EFFECT[case]


def test_memory_is_counted_by_the_rule_of_each_parameter():
    config = load_config([*DEBUG, *MUON, "--optimizer.ema_decay", "0.9"])
    optimizer = resolve(config, 1).optimizer
    shard = torch.empty(10, 4)
    assert optimizer.state_bytes_of("layers.0.attention.wq.weight", shard) == 40 * (4 + 4)
    assert optimizer.state_bytes_of("tok_embeddings.weight", shard) == 40 * (8 + 4)


def test_a_pattern_of_frozen_parameters_is_an_error():
    with pytest.raises(ConfigError, match=r"matches no trained parameter; tok_embeddings.weight is frozen"):
        groups_of({"tok_embeddings.*": {"lr": 0.3}}, *LORA)


def test_cautious_decay_may_be_that_of_one_group():
    cautious = ["--optimizer.cautious_decay", "true", "--optimizer.weight_decay", "0"]
    argv = [*DEBUG, *cautious, "--optimizer.groups.*.wo.weight", "{ decay = 0.1 }"]
    assert resolve(load_config(argv), 1).optimizer.groups[0].weight_decay == 0.1


def rules_of(*argv):
    groups = resolve(load_config([*DEBUG, *argv]), 1).optimizer.groups
    return {name: group.rule for group in groups for name in group.names}


def test_muon_updates_the_matrices_of_the_blocks_and_of_experts_only():
    rules = rules_of(*MUON, "--model.name", "deepseek-v3")
    muon = {name.partition(".")[2].partition(".")[2] for name, rule in rules.items() if rule == "muon"}
    attention = {f"attention.{name}.weight" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")}
    assert muon - attention == {
        f"feed_forward.{part}{name}"
        for part, suffix in (("", ".weight"), ("shared.", ".weight"), ("experts.", ""))
        for name in (f"w{i}{suffix}" for i in (1, 2, 3))
    }
    assert attention <= muon


def test_a_group_may_return_a_matrix_to_adamw_but_not_give_another_parameter_to_muon():
    assert (
        rules_of(*MUON, "--optimizer.groups.*.wo.weight", '{ optimizer = "adamw" }')["layers.0.attention.wo.weight"]
        == "adamw"
    )
    message = "optimizer = muon: tok_embeddings.weight is no matrix of a linear module in the blocks, or of experts"
    with pytest.raises(ConfigError, match=message):
        rules_of(*MUON, "--optimizer.groups.tok_embeddings.*", '{ optimizer = "muon" }')
    with pytest.raises(ConfigError, match=r": needs .optimizer. name = muon"):
        rules_of("--optimizer.groups.layers.*", '{ optimizer = "muon" }')


def test_muon_has_a_rate_of_its_own():
    groups = resolve(
        load_config([*DEBUG, *MUON, "--optimizer.lr", "0.001", "--optimizer.muon_lr", "0.02"]), 1
    ).optimizer.groups
    assert {group.rule: group.lr for group in groups} == {"adamw": 1.0, "muon": pytest.approx(20.0)}


def by_name(*argv):
    """Return name -> (factor of the rate, decay) of some parameters. The model is four times as wide as the base."""
    groups = resolve(load_config([*DEBUG, "--optimizer.base_width", "32", *argv]), 1).optimizer.groups
    found = {name: (group.lr, pytest.approx(group.weight_decay)) for group in groups for name in group.names}
    names = {"embedding": "tok_embeddings.weight", "norm": "norm.weight", "output": "output.weight"}
    names |= {"hidden": "layers.0.attention.wq.weight", "router": "layers.1.feed_forward.router.weight"}
    names |= {"experts": "layers.1.feed_forward.experts.w2"}
    return {kind: found[name] for kind, name in names.items() if name in found}


ADAMW = {"embedding": (1.0, 0.1), "norm": (1.0, 0.0), "output": (0.25, 0.4)}
WIDTHS = {
    "": {**ADAMW, "hidden": (0.25, 0.4)},
    "--optimizer.name muon": {**ADAMW, "hidden": (0.5, 0.2)},
    "--optimizer.name muon --optimizer.muon_scale original": {**ADAMW, "hidden": (1.0, 0.1)},
    "--optimizer.name muon --optimizer.muon_scale unit_rms --optimizer.muon_lr 6e-3": {**ADAMW, "hidden": (2.0, 0.1)},
    "--optimizer.groups.*.wq.weight {lr=3} --optimizer.groups.output.* {decay=0.3}": {
        **{**ADAMW, "output": (0.25, 1.2)},
        "hidden": (0.75, 0.4),
    },
    "--model.name deepseek-v3": {**ADAMW, "router": (0.25, 0.4), "experts": (0.25, 0.4)},
    "--model.name deepseek-v3 --optimizer.name muon": {**ADAMW, "router": (0.25, 0.4), "experts": (0.5, 0.2)},
    "--model.name gemma2 --model.overrides.tied_embeddings false": {
        **{**ADAMW, "embedding": (0.5, 0.2)},
        "hidden": (0.25, 0.4),
    },
}


@pytest.mark.parametrize("argv", WIDTHS)
def test_rates_follow_the_width_by_rule_and_kind_and_a_step_decays_as_at_the_base_width(argv):
    assert by_name(*argv.split()) == WIDTHS[argv]


def test_the_log_names_the_factors_of_the_width():
    config = load_config([*DEBUG, "--optimizer.base_width", "32"])
    resolved = resolve(config, 1)
    assert [str(group).split(":")[0] for group in resolved.optimizer.groups] == [
        "adamw, lr x 1, decay 0.1",
        "adamw, lr x 1, decay 0",
        "adamw, lr x 0.25 (x 0.25 for the width), decay 0.4",
    ]
    line = "width: dim 128, rates tuned at 32"
    assert width_transfer(config, resolved) == (
        f"{line}; initial values: tok_embeddings.weight x 2, output.weight x 0.5, others x 1"
    )
    loaded = load_config([*DEBUG, "--optimizer.base_width", "32", "--checkpoint.init_from", "."])
    assert width_transfer(loaded, resolve(loaded, 1)) == f"{line}; loaded weights keep their values"


def test_a_width_that_rates_cannot_follow_is_one_line():
    with pytest.raises(ConfigError) as failure:
        resolve(load_config([*DEBUG, "--optimizer.base_width", "15"]), 1)
    assert str(failure.value) == (
        "optimizer.base_width: must be at least 16, the width of llama3/debug with one head instead of 8: heads keep their width"
    )


PLACEMENTS = [
    {},
    {"state_dtype": "8bit"},
    {"offload": "state"},
    {"offload": "state_and_gradients"},
    {"in_backward": True},
]


def one_step(placement):
    """Return by how much one step changes each parameter, all of which have the same values and gradients."""
    parameters = {name: torch.nn.Parameter(torch.ones(2, 256)) for name in ("a", "b", "c")}
    options = {"a": {"lr": 0.5, "decay": 0.0}, "b": {"decay": 0.25}}
    config = OptimizerConfig(groups=options, weight_decay=0.5, **placement)
    optimizer = optimizer_class(config)(parameters, config, resolve_groups(config, parameters), 1)
    optimizer.start_step(0.1)
    sum(p.sum() for p in parameters.values()).backward()
    optimizer.clip(None)
    optimizer.step(skip=torch.tensor(False))
    return [round(1 - p.detach().mean().item(), 5) for p in parameters.values()]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_rates_and_decays_of_groups_apply_wherever_the_update_runs(ranks, placement):
    # The first step of AdamW changes each value by lr, besides the decay.
    assert ranks(1).run(one_step, placement) == [[0.05, 0.125, 0.15]]
