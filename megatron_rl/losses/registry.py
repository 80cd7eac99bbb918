"""Losses by name.

Invariant: an unknown name or setting is refused before training starts, naming what there is.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron_rl.losses.grpo import Grpo
from megatron_rl.losses.gspo import Gspo
from megatron_rl.losses.interface import PolicyLoss

NAMES = ("grpo", "gspo")


def build_policy_loss(name: str, **settings: Any) -> PolicyLoss:
    """The loss of a name with its own settings (`clip_low`, ...). Raises ValueError naming key, value and remedy."""
    loss: type[Grpo] | type[Gspo]
    match name:
        case "grpo":
            loss = Grpo
        case "gspo":
            loss = Gspo
        case _:
            raise ValueError(f"algo.name={name}: there is no such loss. Choose one of {', '.join(NAMES)}")
    known = inspect.signature(loss).parameters
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        raise ValueError(f"algo.{unknown[0]}: {name} has no such setting. It has {', '.join(known)}")
    return loss(**settings)
