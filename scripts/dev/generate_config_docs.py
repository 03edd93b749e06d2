"""Write docs/configuration.md from the declarations in trainer/config/schema.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.config.render import settings_as_markdown

INTRODUCTION = """# Configuration

A run is one TOML file; `--section.key value` (or `--section.key=value`) on the command line replaces single values of it.

    ./run_llama_train.sh --config train_configs/debug.toml --training.steps 50 --optimizer.lr 1e-3
    python train.py --config train_configs/debug.toml --print-config        # the whole result, and nothing else
    python train.py --help                                                  # the tables below, in the terminal

- Whatever is not exactly right (an unknown key, a wrong type, a value out of range, a missing file, a combination that
  cannot run, a setting that belongs to another choice) is one line on stderr that says where it was set and what is
  wrong, with exit code 2, before any process group exists. Details of a feature that is switched off are no error: one
  flag is enough to do without it.
- `--print-config` checks every single value and file; whether they make a model and a mesh is checked when a run starts.
- Lists are written `0.9,0.95`, booleans `true` and `false`; `none` is a value only where the type says so. A setting may
  be given once.
- The size of a model can be changed without touching code: `--model.overrides.n_layers 4`, with any field of
  `LlamaSizes` in `models/llama/sizes.py`.
- `fixed on resume`: a run that goes on from a checkpoint must have the same value, or is refused with the difference.
- Relative paths start at the current folder.

Every file in `train_configs/` is a complete example. This page is written by `python scripts/dev/generate_config_docs.py`.

"""

if __name__ == "__main__":
    (ROOT / "docs" / "configuration.md").write_text(INTRODUCTION + settings_as_markdown())
