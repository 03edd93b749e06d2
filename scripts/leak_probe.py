"""Show which positions of a packed sample a token influences under each layout.

The script changes one token of a training sample at a time and compares the last hidden states, from which the logits are
computed, before and after. Positions before the token must not change. With document masks, positions of other documents must not
change. With windows in all layers, positions that are too far away must not change. The last rows are negative controls with
injected bugs, whose leaks must be found.

exit codes: 0: no position leaks, and every injected leak is found; 1: a position leaks; 2: an argument or a setting is wrong

    python scripts/leak_probe.py --config train_configs/sft_debug.toml
    python scripts/leak_probe.py --config my.toml --layout "cp=2 tp=2" --layout "compile.enabled=true" --probes 20
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.system.process import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.batch import Batch
from trainer.build import build_trainer
from trainer.config import Config, ConfigError
from trainer.config.command_line import Arguments, positive_int, run_to_end
from trainer.config.load import load_config
from trainer.data.sampling.samples import Samples
from trainer.parallel.context import all_gather_sequence
from trainer.parallel.pipeline import PipelineStep
from trainer.parallel.step import Step
from trainer.run.resolve import ResolvedRun, resolve
from trainer.testing.bugs import BUGS
from trainer.testing.layouts import Layout, Table, add_layout_option, flags, num_ranks, settings_of
from trainer.testing.ranks import LocalRanks, RankError

LAYOUTS = ["dp_shard=1", "tp=2", "cp=2", "cp=2 tp=2", "pp=2", "compile.enabled=true"]
CONTROLS = {
    "documents visible to each other under cp": "cp=2 data.document_mask=true",
    "window off by one under cp": "cp=2 data.document_mask=false",  # boundaries would hide leaks over a longer distance
}
"""Key of BUGS -> layout in which the bug makes positions leak."""
_CHANGED = 1e-6
"""Fraction of the largest hidden value by which a changed position differs."""


@dataclass(frozen=True)
class Probe:
    token: int
    """Position of the changed token."""
    changed: list[int]
    """Positions whose hidden states changed."""
    allowed: list[int]
    """Positions that may change."""

    @property
    def leaks(self) -> list[int]:
        return sorted(set(self.changed) - set(self.allowed))


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
    plan = resolved.plan
    return min(seq_len, sum((plan.kinds[name].window or seq_len) - 1 for name in plan.layer_kinds))


def last_hidden(step: Step, batch: Batch) -> Tensor | None:
    """Return the input of the output projection, (seq, dim), in full precision. None on ranks without the last stage."""
    with torch.no_grad():
        if isinstance(step, PipelineStep):
            outputs = step._forward(step.shard_sequence(batch))
            return outputs[0] if outputs else None
        return step._loss_sum(batch)


def probe(argv: Sequence[str], count: int, bug: str) -> list[Probe]:
    """Run on this rank. Return the probes on the ranks that have the last stage. bug: key of BUGS, or ""."""
    os.environ["LOG_RANK"] = ""  # only the table is printed
    config = load_config(argv)
    resolved = resolve(config, dist.get_world_size())
    with BUGS[bug].inject() if bug else nullcontext():
        trainer = build_trainer(config, resolved, torch.device("cpu"), None)
    step, cp = trainer.engine.forward_backward, trainer.engine.cp

    def head(hidden: Tensor, weight: Tensor, **options: float) -> Tensor:
        hidden = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
        return all_gather_sequence(hidden.float(), cp, dim=1)[0]

    step.make_head = lambda labels: head
    batch = choose_sample(trainer.data.datasets.training)
    documents, seq_len = batch.documents[0], batch.tokens.shape[1]
    before, probes, positions = last_hidden(step, batch), [], torch.arange(seq_len)
    for token in probed_tokens(documents, count):
        tokens = batch.tokens.clone()
        tokens[0, token] = (tokens[0, token] + 1) % resolved.sizes.vocab_size
        after = last_hidden(step, batch._replace(tokens=tokens))
        allowed = (positions >= token) & (positions - token <= reach(resolved, seq_len))
        if config.data.document_mask:
            allowed &= documents == documents[token]
        if before is not None and after is not None:
            changed = (after - before).abs().amax(-1) > _CHANGED * before.abs().max()
            probes.append(Probe(token, changed.nonzero().flatten().tolist(), allowed.nonzero().flatten().tolist()))
    return probes


def run(argv: Sequence[str], layout: Layout, table: Table, count: int, bug: str = "") -> bool:
    """Print a row and the leaks of a layout. Return whether no position leaks. Raises ConfigError."""
    common = {
        "run.device": "cpu",
        "run.name": "leak-probe",
        "training.local_batch_size": "1",
        "training.global_batch_size": "64",
    }
    given = settings_of(argv) | common | layout.settings
    config = load_config(flags(given))
    name = f"negative control: {bug}" if bug else layout.text
    try:
        resolve(config, num_ranks(config.parallel))
        probes = next(p for p in LocalRanks(num_ranks(config.parallel)).run(probe, flags(given), count, bug) if p)
    except ConfigError as error:
        table.row(name, f"does not fit: {config.explain(error)}")
        return True
    except RankError as error:
        table.row(name, f"FAIL: {str(error).strip().splitlines()[-1]}")
        return False
    unaffected = [p.token for p in probes if p.token not in p.changed]
    leaks = sum(len(p.leaks) for p in probes)
    changed, allowed = sum(len(p.changed) for p in probes), sum(len(p.allowed) for p in probes)
    verdict = ("NOT FOUND", "found")[leaks > 0] if bug else ("no leak", "LEAK")[leaks > 0]
    table.row(name, num_ranks(config.parallel), len(probes), changed, allowed, leaks, verdict)
    for p in [p for p in probes if p.leaks][:4]:
        shown = ", ".join(map(str, p.leaks[:8])) + ", ..." * (len(p.leaks) > 8)
        print(f"    the token at position {p.token} changes positions {shown}", flush=True)
    if unaffected:
        print(f"    the token at position {unaffected[0]} does not change its own position", flush=True)
    return not leaks and not unaffected


def main() -> None:
    parser = Arguments(__doc__, settings=True)
    add_layout_option(parser, ", ".join(LAYOUTS))
    parser.add_argument("--probes", type=positive_int, default=12, metavar="N", help="number of tokens to change")
    args, argv = parser.parse_known_args()
    config = load_config(argv)
    table = Table(layout="<64", ranks=">5", probes=">6", changed=">8", may_change=">10", leaks=">6")
    passed = [run(argv, Layout.parse(text), table, args.probes) for text in args.layout or LAYOUTS]
    found = [not run(argv, Layout.parse(CONTROLS[name]), table, args.probes, name) for name in controls(config)]
    sys.exit(0 if all(passed) and all(found) else 1)


def controls(config: Config) -> list[str]:
    """Return the bugs that make positions leak in a run of this configuration."""
    resolved = resolve(config, 1)
    has_reach = reach(resolved, config.training.seq_len) < config.training.seq_len
    return [name for name in CONTROLS if (has_reach if "window" in name else True)]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the ranks too
    run_to_end(main)
