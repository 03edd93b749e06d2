"""What may restrict a setting, and the restrictions and types that several sections share."""

from dataclasses import dataclass
from typing import Annotated

from trainer.base.config.schema.condition import Condition


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Restrictions on one setting. `min` and `max` are inclusive."""

    min: float | None = None
    exclusive_min: float | None = None
    max: float | None = None
    unit: str = ""
    fixed_on_resume: bool = False
    """Whether the saved state depends on the setting. If so, a run can resume only with the value in the checkpoint."""
    per_node: bool = False
    """Whether the nodes of one run may have different values."""
    multiline: bool = False
    """Whether a text may contain line breaks and tabs."""
    free_keys: bool = False
    """Whether the keys of the table may be any printable text."""
    only_with: tuple[Condition, ...] = ()
    """Conditions under which the setting may differ from its default. Each is a row of the table in compatibility.py."""
    used_with: Condition | None = None
    """Condition under which the setting has an effect. Otherwise the setting is ignored without an error."""


FIXED = Constraint(fixed_on_resume=True)
PER_NODE = Constraint(per_node=True)
Count = Annotated[int, Constraint(min=1, max=4096)]
CountOrZero = Annotated[int, Constraint(min=0, max=4096)]
Steps = Annotated[int, Constraint(min=1, max=10**12, unit="steps")]
StepsOrZero = Annotated[int, Constraint(min=0, max=10**12, unit="steps")]
Fraction = Annotated[float, Constraint(min=0, max=1)]
