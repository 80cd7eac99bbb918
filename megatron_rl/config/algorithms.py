"""The keys of `algo`: what all algorithms share, and what each has of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le
from pydantic import TypeAdapter

from megatron_rl.config.values import (
    BelowOne,
    NotNegative,
    Off,
    OpenShare,
    Options,
    PluginName,
    Section,
)


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings(Section):
    """Weights of tokens that correct the engine's policy to the old one; `losses/corrections.py`
    has the formulas.
    """

    kind: Annotated[Literal["off", "tis", "icepop", "mis"], Off] = "off"
    level: Literal["token", "sequence", "geometric"] | None = (
        None  # of the ratio; null: the kind's own
    )
    low: OpenShare | None = (
        None  # below it a ratio is masked; null: the kind's own, and so the upper one
    )
    high: Annotated[float, Gt(1)] | None = None  # above it a ratio is masked, or with tis truncated


@dataclass(frozen=True, kw_only=True)
class AlgoSettings(Section):
    """What every algorithm shares. `name` chooses the loss; see the subclasses."""

    name: str
    advantages: Literal["group", "one"] = (
        "group"  # group: relative to the group; one: 1 for every judged rollout
    )
    normalize_std: bool = True  # divide group advantages by the group's standard deviation
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    permute_rewards: bool = (
        False  # control experiment: verdicts shuffled across the batch; nothing can be learnt
    )


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(AlgoSettings):
    """Token-level ratios with asymmetric clipping (DAPO's clip-higher), averaged over the batch's
    tokens.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: OpenShare = 0.2
    clip_high: Annotated[float, Gt(0)] = 0.28


@dataclass(frozen=True, kw_only=True)
class GspoSettings(AlgoSettings):
    """Sequence-level ratios with gradients through the tokens (GSPO-token)."""

    name: Literal["gspo"] = "gspo"
    clip_low: OpenShare = 3e-4
    clip_high: Annotated[float, Gt(0)] = 4e-4


@dataclass(frozen=True, kw_only=True)
class EspoSettings(AlgoSettings):
    """Entropy-grouped importance sampling with entropy-adaptive clipping."""

    name: Literal["espo"] = "espo"
    alpha: NotNegative = 0.02
    fractions: list[Annotated[float, Gt(0), Le(1)]] = field(
        default_factory=lambda: [0.2]
    )  # []: no grouping
    min_clip: BelowOne = 3e-4
    fixed_clip: OpenShare | None = None  # ablation: one epsilon instead of the adaptive ones


@dataclass(frozen=True, kw_only=True)
class SftSettings(AlgoSettings):
    """Supervised: the mean negative log-likelihood of the response tokens."""

    name: Literal["sft"] = "sft"
    advantages: Literal["group", "one"] = "one"


@dataclass(frozen=True, kw_only=True)
class CustomAlgoSettings(AlgoSettings):
    """A loss of the user's own; `options` are its constructor's arguments."""

    name: PluginName
    options: Options = field(default_factory=dict)


ALGORITHMS: dict[str, type[AlgoSettings]] = {
    "grpo": GrpoSettings,
    "gspo": GspoSettings,
    "espo": EspoSettings,
    "sft": SftSettings,
    "custom": CustomAlgoSettings,
}


def algorithm_of(algo: Any) -> str:
    """Which of `ALGORITHMS` a tree of `algo` keys is checked against."""
    name = algo.get("name") if isinstance(algo, dict) else None
    return name if name in ALGORITHMS else "custom"


def read_algorithm(tree: Any) -> AlgoSettings:
    """The checked settings of a tree of `algo` keys."""
    return TypeAdapter(ALGORITHMS[algorithm_of(tree)]).validate_python(tree)
