"""The state of a run, except for its tensors."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, get_origin, get_type_hints


@dataclass(kw_only=True)
class TrainState:
    """Content of train_state.json: the progress of a run, and the values that a resumed run must not change."""

    step: int = 0
    """Number of completed optimizer steps, including skipped steps."""
    cursor: int = 0
    """Number of consumed samples. It is also the position in the sample order, not counting `skipped_samples`."""
    tokens_seen: int = 0
    rollbacks: int = 0
    skipped_samples: list[tuple[int, int]] = field(default_factory=list)
    """Half-open ranges of the sample order that rollbacks skipped, sorted and disjoint."""
    best: list[Any] = field(default_factory=list)
    """State of BestTracker, which tracks the best checkpoint by keep_best_on."""
    early_stopping: list[Any] = field(default_factory=list)
    """Memory of EarlyStopping."""
    health: list[Any] = field(default_factory=list)
    """Memory of Health."""
    mixture: list[list[int]] = field(default_factory=list)
    """Start and quotas of each phase of the mixture of datasets (see MixturePhase)."""
    world_size: int = 1
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """Settings and dataset that a resumed run must not change, as name -> value. Messages show these names."""
    rng: list[str] = field(default_factory=list)
    """Names of the random generators whose states each rank saved."""

    def advance(self, samples: int, seq_len: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.cursor += samples
        self.tokens_seen += samples * seq_len

    def skip(self, start: int, stop: int) -> None:
        """Add a half-open range to the skipped samples. Adjacent ranges are merged."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted([*self.skipped_samples, (start, stop)]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        self.skipped_samples = merged

    def resume_from(self, saved: "TrainState") -> None:
        """Replace this state's progress with the checkpoint's progress."""
        self.step, self.cursor, self.tokens_seen = saved.step, saved.cursor, saved.tokens_seen
        self.rollbacks, self.skipped_samples = saved.rollbacks, list(saved.skipped_samples)
        self.early_stopping, self.health = list(saved.early_stopping), list(saved.health)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "TrainState":
        """Parse the text of train_state.json. Raises ValueError, TypeError or KeyError if it is not the state of a run."""
        raw = {"early_stopping": [], "health": ["unknown"]} | json.loads(text)  # earlier versions did not save them
        values = {name: raw[name] for name in get_type_hints(cls)}
        for name, hint in get_type_hints(cls).items():
            if type(values[name]) is not (get_origin(hint) or hint):
                raise TypeError(name)
        values["skipped_samples"] = [(start, stop) for start, stop in values["skipped_samples"]]
        if not all(type(n) is int for samples in values["skipped_samples"] for n in samples):
            raise TypeError("skipped_samples")
        return cls(**values)


def is_due(step: int, interval: int, last_step: int) -> bool:
    """Return whether an action is due after a step. It is due at multiples of the interval and at the last step. With interval 0
    it is due only at the last step."""
    return step == last_step or (interval > 0 and step % interval == 0)
