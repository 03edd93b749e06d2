"""Show which positions of a packed sample a token influences under each layout.

The script changes one token of a training sample at a time and compares the last hidden states, from which the logits are
computed, before and after. Positions before the token must not change. With document masks, positions of other documents must not
change. With windows in all layers, positions that are too far away must not change. The last rows are negative controls with
injected bugs, whose leaks must be found. The layouts replace the sections [parallel], [activation_checkpoint] and [compile] of
the configuration file.

exit codes: 0: no position leaks, and every injected leak is found; 1: otherwise; 2: an argument or a setting is wrong

    python scripts/leak_probe.py --config train_configs/sft_debug.toml
    python scripts/leak_probe.py --config my.toml --layout "cp=2 tp=2" --layout "compile.enabled=true" --probes 20
"""

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import positive_int
from trainer.base.config.arguments import Arguments, add_layout_option
from trainer.base.config.exits import answer_early, run_to_end

LAYOUTS = ["dp_shard=1", "tp=2", "cp=2", "cp=2 tp=2", "pp=2", "compile.enabled=true"]


def arguments() -> Arguments:
    parser = Arguments(__doc__, settings=True)
    add_layout_option(parser, ", ".join(LAYOUTS))
    parser.add_argument("--probes", type=positive_int, default=12, metavar="N", help="number of tokens to change")
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.delta_net import RecurrentMixer
from models.spec import Head
from trainer.base.config import Config
from trainer.base.config.load import load_config
from trainer.batch import Batch
from trainer.build import build_trainer
from trainer.data.sampling.samples import Samples
from trainer.parallel.step import Step
from trainer.run.resolve import ResolvedRun, resolve
from trainer.tools.testing.bugs import BUGS
from trainer.tools.testing.layouts import Table, num_ranks
from trainer.tools.testing.parity import Row, Runs, build_rows, control_row, full
from trainer.tools.testing.ranks import LocalRanks, RankError

_CHANGED = 1e-6
"""Fraction of the largest hidden value by which a changed position differs."""
_DECAY_RATE = 0.01
"""Decay of a recurrence's state with a token, for a step of one (see GatedDeltaNet)."""


class _Hidden:
    """An objective whose head returns the hidden state, (batch, seq / cp, dim), instead of a loss."""

    def head(self, *args: object) -> Head:
        return lambda hidden, weight, softcap=None: full(hidden)


@dataclass(frozen=True)
class Probe:
    token: int
    """Position of the changed token."""
    changed: set[int]
    """Positions whose hidden states changed, among those of one rank or of all ranks."""
    allowed: set[int]
    """Positions that may change."""

    @property
    def leaks(self) -> list[int]:
        return sorted(self.changed - self.allowed)


def choose_sample(samples: Samples) -> Batch:
    """Return the sample with the most documents among the first ones, as a batch of one sample."""
    candidates = (samples[np.array([i])] for i in range(min(200, len(samples))))
    return max(candidates, key=lambda batch: len(batch.documents.unique()))


def probed_tokens(documents: Tensor, count: int) -> list[int]:
    """Return positions at both sides of document boundaries first, then evenly spaced ones. documents: (seq,)."""
    starts = (documents.diff().nonzero().flatten() + 1).tolist()
    spaced = range(0, len(documents), max(1, len(documents) // count))
    positions = [p for start in starts for p in (start, start - 1)] + list(spaced)
    return sorted(list(dict.fromkeys(positions))[:count])


def reach(resolved: ResolvedRun, seq_len: int) -> int:
    """Return the largest distance over which a token influences another through all layers."""
    structure = resolved.structure
    return min(seq_len, sum(structure.kinds[name].reach(seq_len) for name in structure.layer_kinds))


@torch.no_grad()
def slow_decay(model: nn.Module) -> None:
    """Let states of recurrences decay slowly (_DECAY_RATE): what leaks from a state that decays fast is less than rounding
    errors."""
    for mixer in (module for module in model.modules() if isinstance(module, RecurrentMixer)):
        mixer.A_log.fill_(math.log(_DECAY_RATE))


@torch.no_grad()
def last_hidden(step: Step, batch: Batch) -> Tensor | None:
    """Return the input of the output projection at this rank's positions, (seq / cp, dim). None without the last stage."""
    hidden = step._forward(step.shard_sequence(batch), _Hidden())
    return None if hidden is None else hidden[0].float()


def probe(argv: Sequence[str], count: int, bug: str) -> list[Probe]:
    """Run on this rank. Return the changes at its positions. bug: key of BUGS, or ""."""
    os.environ["LOG_RANK"] = ""  # only the table is printed
    with BUGS[bug].inject() if bug else nullcontext():
        return _probe(load_config(argv), count)


def _probe(config: Config, count: int) -> list[Probe]:
    resolved = resolve(config, dist.get_world_size())
    trainer = build_trainer(config, resolved, torch.device("cpu"), None)
    step, batch = trainer.engine.forward_backward, choose_sample(trainer.data.datasets.training)
    for part in trainer.engine.model_parts.values():
        slow_decay(part)
    documents, positions = batch.documents[0], torch.arange(batch.tokens.shape[1])
    own_positions = step.shard_sequence(batch._replace(positions=positions[None])).positions[0]
    before, probes = last_hidden(step, batch), []
    for token in probed_tokens(documents, count):
        tokens = batch.tokens.clone()
        tokens[0, token] = (tokens[0, token] + 1) % resolved.sizes.vocab_size
        after, changed = last_hidden(step, batch._replace(tokens=tokens)), set()
        if before is not None and after is not None:
            is_changed = (after - before).abs().amax(-1) > _CHANGED * before.abs().max()
            changed = set(own_positions[is_changed].tolist())
        allowed = (positions >= token) & (positions - token <= reach(resolved, len(positions)))
        if config.data.document_mask:
            allowed &= documents == documents[token]
        probes.append(Probe(token, changed, set(positions[allowed].tolist())))
    return probes


def run(runs: Runs, row: Row, table: Table, count: int, bug: str = "") -> bool:
    """Print a row and its leaks. Return whether the run is correct, or whether the leaks of an injected bug are found."""
    name, ranks = f"negative control: {bug}" if bug else row.layout.text, num_ranks(row.config.parallel)
    try:
        parts = LocalRanks(ranks).run(probe, runs.flags(row.settings), count, bug)
    except RankError as error:
        table.row(name, ranks, f"FAIL: {str(error).strip().splitlines()[-1]}")
        return False
    probes = [Probe(p[0].token, set().union(*(q.changed for q in p)), p[0].allowed) for p in zip(*parts, strict=True)]
    leaks, unaffected = sum(len(p.leaks) for p in probes), [p.token for p in probes if p.token not in p.changed]
    verdict = ("NOT FOUND" if not leaks else "found") if bug else ("LEAK" if leaks else "no leak")
    changed, allowed = sum(len(p.changed) for p in probes), sum(len(p.allowed) for p in probes)
    table.row(name, ranks, len(probes), changed, allowed, leaks, verdict)
    for p in [p for p in probes if p.leaks][:4]:
        shown = ", ".join(map(str, p.leaks[:8])) + (", ..." if len(p.leaks) > 8 else "")
        print(f"    the token at position {p.token} changes positions {shown}", flush=True)
    for token in unaffected[:1]:
        print(f"    the token at position {token} does not change its own position", flush=True)
    return bool(leaks) == bool(bug) and not unaffected


def main() -> None:
    args, argv = arguments().parse_known_args()
    with tempfile.TemporaryDirectory(prefix="leak-probe-", ignore_cleanup_errors=True) as folder:
        runs = Runs(argv, 1, Path(folder))
        rows, misfits = build_rows(runs, args.layout, LAYOUTS, [1])
        controls = {name: row for name, bug in BUGS.items() if bug.leaks and (row := control_row(runs, bug))}
        table = Table(layout="<64", ranks=">5", probes=">6", changed=">8", may_change=">10", leaks=">6")
        for text, error in misfits:
            table.row(text, f"does not fit: {error}")
        passed = [run(runs, row, table, args.probes) for row in rows]
        passed += [run(runs, row, table, args.probes, name) for name, row in controls.items()]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    run_to_end(main)
