"""Weight updates from one process that has all weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.crew import Alone
from sglang_bridge.weights.fused_layout import update_unit
from sglang_bridge.weights.part import RankPart
from sglang_bridge.weights.source import SoleSource
from sglang_bridge.weights.transport import WeightTransport
from sglang_bridge.weights.updater import WeightUpdater


class SoleUpdater:
    """Sends streams of named tensors over a transport."""

    def __init__(self, transport: WeightTransport, *, bucket_bytes: int) -> None:
        part = RankPart(transport, Alone(), bucket_bytes=bucket_bytes, open_admin=_open_admin)
        self._updater = WeightUpdater(part)

    def push(self, tensors: NamedTensors, version: int, admins: Sequence[AdminClient]) -> None:
        """See `WeightUpdater.push`."""
        self._updater.push(SoleSource(lambda: tensors), version, admins)

    def close(self) -> None:
        """Leave every engine."""
        self._updater.close()


def in_units(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put tensors that an engine fuses next to each other. Files have an alphabetical order."""
    first_of: dict[str, int] = {}
    for index, name in enumerate(weights):
        first_of.setdefault(update_unit(name), index)
    return {name: weights[name] for name in sorted(weights, key=lambda n: first_of[update_unit(n)])}


def _open_admin(engine: Engine) -> AdminClient:
    raise AssertionError("the only rank has clients already")
