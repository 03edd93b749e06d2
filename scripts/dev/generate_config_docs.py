"""Generate docs/configuration.md from trainer/config/schema.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.config.render import settings_as_markdown

INTRODUCTION = """# Configuration

A run is one TOML file; `--section.key value` (or `--section.key=value`) on the command line overrides single values.

    ./run_llama_train.sh --config train_configs/debug.toml --training.steps 50 --optimizer.lr 1e-3
    python train.py --config train_configs/debug.toml --print-config        # print the complete result
    python train.py --help                                                  # print the tables below

- An unknown key, a wrong type, a value out of range, a missing file or an incompatible combination is an error: one line on
  stderr with the setting, its origin and the broken rule, and exit code 2, before any process group exists.
- `only with`: any value but the default is an error unless the condition holds.
- `used with`: the setting is ignored unless the condition holds, so that one flag switches a feature off.
- `fixed on resume`: a run that resumes from a checkpoint must have the same value, or stops with an error that names both.
- `--print-config` checks single values, combinations and files. Rules that involve the model or the device mesh are checked
  when a run starts.
- Lists are written `0.9,0.95`, booleans `true` and `false`; `none` is a value only for types that list it. A setting may be
  given once.
- `--model.overrides.n_layers 4` changes the size of a model without changing code. Any field of `LlamaSizes` in
  `models/llama/sizes.py` can be set this way.
- Relative paths start at the current folder.

Every file in `train_configs/` is a complete example. `python scripts/dev/generate_config_docs.py` generates this page.

"""

if __name__ == "__main__":
    (ROOT / "docs" / "configuration.md").write_text(INTRODUCTION + settings_as_markdown())
