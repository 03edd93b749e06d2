"""Draw the layers of tests/test_layering.py, for README.md and docs/architecture.md.

python scripts/dev/plot_layers.py
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from tests.test_layering import LAYERS

PICTURE = ROOT / "docs" / "images" / "layers.svg"
NOTES = {
    "train": "start a run",
    "scripts": "commands",
    "trainer.launch": "torchrun",
    "trainer.tools.testing": "ranks for tests",
    "trainer.build": "constructs a run",
    "trainer.tools.dry_run": "what a run would do",
    "trainer.tools.report": "page about runs",
    "trainer.trainer": "the loop",
    "trainer.tools.planner": "estimates",
    "trainer.tools.trial": "data of a dry run",
    "trainer.initial_model": "first weights",
    "trainer.engine": "one optimizer step",
    "trainer.run": "metrics, run folder",
    "trainer.evaluate": "held-out loss",
    "trainer.tasks": "scores of tasks",
    "trainer.inference": "load, generate",
    "trainer.optim": "updates",
    "trainer.parallel": "meshes, FSDP, step",
    "trainer.resilience": "skips, hangs",
    "trainer.checkpoint": "saving, resuming",
    "trainer.objective": "losses",
    "trainer.adapters": "LoRA",
    "trainer.runtime": "devices, groups",
    "trainer.data": "tokens, samples",
    "trainer.base.config": "settings",
    "trainer.base.system": "files, processes",
    "models": "the networks",
    "trainer.batch": "Batch",
    "trainer.state": "TrainState",
}
"""Content of each entry of LAYERS."""
HUES = {"trainer.base": 150, "trainer.tools": 280, "trainer.": 210}
"""Colours of the wings."""
LEFT, WIDTH, HEIGHT, GAP = 56, 744, 46, 8
"""Of the rows of boxes, in pixels."""


def path(module: str) -> str:
    """Return the path of a module or package: "trainer.run" -> "trainer/run/"."""
    name = module.replace(".", "/")
    return f"{name}/" if (ROOT / name).is_dir() else f"{name}.py"


def row(index: int, layer: Sequence[str], top: int) -> list[str]:
    """Return the elements of a layer whose number is `index`. top: y of its boxes."""
    width = (WIDTH - GAP * (len(layer) - 1)) / len(layer)
    elements = [f'<text x="30" y="{top + 28}" fill="#333" font-weight="bold">{index}</text>']
    for i, module in enumerate(layer):
        x, middle = LEFT + i * (width + GAP), LEFT + i * (width + GAP) + width / 2
        hue = next((hue for wing, hue in HUES.items() if module.startswith(wing)), 40)
        elements += [
            f'<rect x="{x:.0f}" y="{top}" width="{width:.0f}" height="{HEIGHT}" rx="5" fill="hsl({hue},55%,88%)" stroke="#456"/>',
            f'<text x="{middle:.0f}" y="{top + 20}" text-anchor="middle" fill="#123">{path(module)}</text>',
            f'<text x="{middle:.0f}" y="{top + 37}" text-anchor="middle" fill="#456" font-size="12">{NOTES[module]}</text>',
        ]
    return elements


def render(layers: Sequence[set[str]]) -> str:
    """Return the picture. layers: the lowest first; each is a set of modules and packages."""
    size = HEIGHT + GAP
    bottom = len(layers) * size
    tip = '<path d="M0 0 L10 5 L0 10 z" fill="#555"/>'
    rule = "A module imports lower layers and its own folder. Folders of one layer do not import each other."
    rows = [line for i, layer in enumerate(layers) for line in row(i, sorted(layer), bottom - (i + 1) * size + GAP)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {bottom + 40}"'
            ' font-family="sans-serif" font-size="15" role="img" aria-label="Layers of the project">',
            "<title>Layers: a module imports lower layers only</title>",
            f'<rect width="{LEFT + WIDTH + 10}" height="{bottom + 40}" fill="white"/>',
            f'<defs><marker id="tip" markerWidth="10" markerHeight="10" refX="5" refY="5" orient="auto">{tip}</marker></defs>',
            f'<line x1="16" y1="{GAP}" x2="16" y2="{bottom - 8}" stroke="#555" stroke-width="2" marker-end="url(#tip)"/>',
            f'<text x="{LEFT}" y="{bottom + 28}" fill="#333">{rule}</text>',
            *rows,
            "</svg>\n",
        ]
    )


def main() -> None:
    PICTURE.write_text(render(LAYERS))


if __name__ == "__main__":
    main()
