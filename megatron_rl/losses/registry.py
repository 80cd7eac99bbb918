"""Losses by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_rl.losses.grpo import Grpo
from megatron_rl.losses.gspo import Gspo
from megatron_rl.losses.interface import PolicyLoss

NAMES = ("grpo", "gspo", "espo")


def build_policy_loss(name: str, **settings: Any) -> PolicyLoss:
    """The loss of a name with its own settings (`clip_low`, ...). Raises ValueError naming key, value and remedy."""
    if name not in NAMES:
        raise ValueError(f"algo.name={name}: there is no such loss. Choose one of {', '.join(NAMES)}")
    loss = _loss_class(name)
    known = inspect.signature(loss).parameters
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        raise ValueError(f"algo.{unknown[0]}: {name} has no such setting. It has {', '.join(known)}")
    return loss(**settings)


def _loss_class(name: str) -> Callable[..., PolicyLoss]:
    if name == "espo":
        from megatron_rl.losses.espo import Espo  # loads the kernels, which the other losses do without

        return Espo
    return Grpo if name == "grpo" else Gspo
