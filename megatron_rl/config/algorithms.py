"""The keys of `algo`: common ones, and the keys of each algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import TypeAdapter

from megatron_rl.config.values import (
    BelowOne,
    NotNegative,
    Off,
    OpenShare,
    Options,
    PluginName,
    Section,
    Text,
)


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings(Section):
    """Weights of tokens that correct the policy of the engine to the old policy of the trainer.

    `losses/corrections.py` has the formulas.
    """

    kind: Annotated[Literal["off", "tis", "icepop", "mis"], Off] = "off"
    # The level at which ratios are formed. null: the default of the kind.
    level: Literal["token", "sequence", "geometric"] | None = None
    # Tokens or sequences with a smaller ratio are masked. null: the default of the kind.
    low: OpenShare | None = None
    # Larger ratios are masked or, with kind=tis, truncated. null: the default of the kind.
    high: Annotated[float, Gt(1)] | None = None


@dataclass(frozen=True, kw_only=True)
class KlSettings(Section):
    """A penalty on the divergence from a frozen reference policy.

    `losses/regularization.py` has the formula.
    """

    # The weight of the penalty in the loss. 0: no penalty, and no reference.
    coef: NotNegative = 0.0
    # A checkpoint in Hugging Face format of the same model. null: the start checkpoint.
    reference: Text | None = None


@dataclass(frozen=True, kw_only=True)
class AlgoSettings(Section):
    """The keys of all algorithms. `name` chooses the loss; its own keys are in the subclasses."""

    name: str
    # Divides advantages by the group's standard deviation.
    normalize_std: bool = True
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    kl: KlSettings = field(default_factory=KlSettings)
    # The weight of the mean entropy in the objective. 0: no bonus.
    entropy_coef: NotNegative = 0.0

    def compares_groups(self, environment: str) -> bool:
        """Return whether advantages are relative to the group.

        Else every rollout with a verdict has the advantage 1. environment: its name.
        """
        return self.name != "sft" and environment != "demonstration"


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(AlgoSettings):
    """GRPO: token-level ratios with asymmetric clipping (DAPO's clip-higher), averaged over the
    tokens of the batch.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: OpenShare = 0.2
    clip_high: Annotated[float, Gt(0)] = 0.28


@dataclass(frozen=True, kw_only=True)
class GspoSettings(AlgoSettings):
    """GSPO-token: sequence-level ratios with gradients through the tokens."""

    name: Literal["gspo"] = "gspo"
    clip_low: OpenShare = 3e-4
    clip_high: Annotated[float, Gt(0)] = 4e-4


@dataclass(frozen=True, kw_only=True)
class CispoSettings(AlgoSettings):
    """CISPO: clipped token-level ratios as weights of the log-likelihood. Every token keeps its
    gradient.
    """

    name: Literal["cispo"] = "cispo"
    # Weights are at least 1 - clip_low. 1: no lower limit, as in the paper.
    clip_low: Annotated[float, Gt(0), Le(1)] = 1.0
    # Weights are at most 1 + clip_high. The paper gives no number.
    clip_high: Annotated[float, Gt(0)] = 4.0


@dataclass(frozen=True, kw_only=True)
class EspoSettings(AlgoSettings):
    """ESPO: importance sampling by entropy groups, with clip ranges that follow the entropy."""

    name: Literal["espo"] = "espo"
    # The clip range per unit of normalized entropy.
    alpha: NotNegative = 0.02
    # The shares of a response's tokens, by entropy, that form groups. []: no grouping. The kernel
    # sets the limits.
    fractions: list[Annotated[float, Ge(1e-6), Le(1 - 1e-6)]] = field(default_factory=lambda: [0.2])
    # The smallest clip range.
    min_clip: BelowOne = 3e-4
    # For ablations: one clip range in place of the adaptive ones.
    fixed_clip: OpenShare | None = None


@dataclass(frozen=True, kw_only=True)
class SftSettings(AlgoSettings):
    """Supervised fine-tuning: the mean negative log-likelihood of the response tokens."""

    name: Literal["sft"] = "sft"


@dataclass(frozen=True, kw_only=True)
class CustomAlgoSettings(AlgoSettings):
    """A user-defined loss."""

    name: PluginName
    # The constructor arguments of the loss.
    options: Options = field(default_factory=dict)


ALGORITHMS: dict[str, type[AlgoSettings]] = {
    "grpo": GrpoSettings,
    "gspo": GspoSettings,
    "cispo": CispoSettings,
    "espo": EspoSettings,
    "sft": SftSettings,
    "custom": CustomAlgoSettings,
}


def algorithm_of(algo: Any) -> str:
    """Return the name in `ALGORITHMS` whose class checks a tree of `algo` keys."""
    name = algo.get("name") if isinstance(algo, dict) else None
    return name if name in ALGORITHMS else "custom"


def read_algorithm(tree: Any) -> AlgoSettings:
    """Return the settings of a tree of `algo` keys. Raises `pydantic.ValidationError`."""
    return TypeAdapter(ALGORITHMS[algorithm_of(tree)]).validate_python(tree)
