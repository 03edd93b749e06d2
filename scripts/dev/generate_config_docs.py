"""Generate docs/configuration.md from the schema of settings, docs/compatibility.md from the table of combinations that are
refused, and docs/coming_from.md from foreign names."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.render import compatibility_as_markdown, foreign_as_markdown, settings_as_markdown

INTRODUCTION = """# Configuration

This page lists every setting. A TOML file configures a run. `--section.key value` (or `--section.key=value`) on the command line
overrides a single value.

    ./run_llama_train.sh --config train_configs/debug.toml --training.steps 50 --optimizer.lr 1e-3
    ./run_llama_train.sh --config my.toml --from weights/Qwen3-0.6B         # model, weights, tokenizer, chat template
    python train.py --config train_configs/debug.toml --print-config        # print the complete result
    python train.py --help                                                  # print the tables below

- An unknown key, a wrong type, a value out of range, a missing file or an incompatible combination is an error. Before any
  process group exists, the command prints one line with setting, origin and broken rule to stderr and exits with code 2.
- `needs`, `not with`: a combination that does not hold is an error ([compatibility.md](compatibility.md) gives the reasons).
- `only with`: any value but the default is an error unless the condition holds.
- `used with`: the setting is ignored unless the condition holds, so that one flag switches a feature off.
- `fixed on resume`: a run that resumes from a checkpoint must have the same value. Otherwise an error names both values.
- `--print-config` checks single values, combinations and files. Rules that involve the model or the device mesh are checked
  when a run starts, and by [`--dry-run`](running.md#dry-run).
- Lists are written `0.9,0.95`, booleans `true` and `false`; `none` is a value only of settings whose type lists it. A flag may
  be given only once.
- `--model.overrides.n_layers 4` changes the size of a model without changing code. Any field of the sizes of the model's
  family can be set this way (`models/sizes.py` and the family's file in `models/`).
- Relative paths start at the current folder.

Every file in `train_configs/` is a complete example. `python scripts/dev/generate_config_docs.py` generates this page.

"""

COMPATIBILITY = """# What works with what

Settings combine freely, except for the pairs on this page. A run with such a pair is refused with one line, which names the
setting, its value, where the value comes from, the rule and the reason:

    --optimizer.in_backward true: is incompatible with [optimizer] offload: offload updates parameters only after backward

The tables are generated from the table that is checked (`trainer/base/config/compatibility.py`), so they are complete, with one
addition: a setting that belongs to a feature is refused without it. [configuration.md](configuration.md) lists these conditions
as `only with`. `python train.py --help` shows both beside each setting.

- A setting without a value means that it is set: not empty, 0, `false`, `"none"` or `"off"`.
- Pairs of settings alone are refused when a configuration is loaded, also by `--print-config`. Pairs with a model, a device or a
  version of torch are refused when a run starts, by [`--dry-run`](running.md#dry-run) and by `scripts/plan.py`.
- Numbers that must fit each other (degrees and dimensions, batch and microbatches) and files that do not suit are not pairs;
  their own line is printed when they are found.

"""

COMING_FROM = """# Coming from another trainer

This page translates the settings of other trainers. The same table answers on the command line and in a settings file: an
unknown setting with one of these names is an error whose line names its replacement.

    --lora_r: unknown setting; use '--lora.rank'

Four differences explain most rows.

- **A run is one TOML file** with sections; `--section.key value` on the command line overrides one value. There are no YAML
  files and no `key=value` arguments. `NGPU=8 ./run_llama_train.sh --config FILE` starts eight ranks.
- **The batch is given in samples for the whole step** (`training.global_batch_size`), over all ranks. The number of microbatches
  follows from it and `training.local_batch_size`, so that a run on other ranks sees the same batches.
- **Sharding is the default** (FSDP over all ranks). The degrees are `parallel.dp_replicate`, `parallel.dp_shard`, `parallel.cp`,
  `parallel.tp` and `parallel.pp`; their product is the number of ranks.
- **Fine-tuning is a dataset**, LoRA is `lora.rank`, preferences are `preference.loss`; the command stays the same. A run resumes
  by itself from its newest checkpoint.

`python scripts/dev/generate_config_docs.py` generates the tables. [configuration.md](configuration.md) explains each setting.

"""

if __name__ == "__main__":
    (ROOT / "docs" / "coming_from.md").write_text(COMING_FROM + foreign_as_markdown())
    (ROOT / "docs" / "compatibility.md").write_text(COMPATIBILITY + compatibility_as_markdown())
    (ROOT / "docs" / "configuration.md").write_text(INTRODUCTION + settings_as_markdown())
