"""The rule by which a probe becomes a whole group. It travels with the request for the probe."""

from __future__ import annotations

import msgspec

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.wire_types import Count
from megatron_rl.credit.group_kinds import GroupKind, kind_of


class Extension(msgspec.Struct, frozen=True):
    """Extends a probe to `group_size` rollouts if it is of one of these kinds.

    The rule is a pure function of the probe, so whoever has its rollouts can apply it.
    """

    group_size: Count
    kinds: tuple[GroupKind, ...]

    def applies_to(self, probe: Group) -> bool:
        """Return True if the rest of the group is to be sampled."""
        return kind_of(probe) in self.kinds
