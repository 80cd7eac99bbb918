"""Losses by name."""

from __future__ import annotations

from megatron_rl.config.algorithms import (
    AlgoSettings,
    CustomAlgoSettings,
    EspoSettings,
    GrpoSettings,
    GspoSettings,
    SftSettings,
)
from megatron_rl.contracts.plugins import load_plugin
from megatron_rl.losses.grpo import Grpo
from megatron_rl.losses.gspo import Gspo
from megatron_rl.losses.interface import PolicyLoss
from megatron_rl.losses.sft import Sft
from megatron_rl.losses.user_loss import UserLoss
from megatron_rl.models.shape import ModelShape


def open_loss(algo: AlgoSettings, shape: ModelShape) -> PolicyLoss:
    """The loss that `algo.name` chooses.

    Raises `PluginError` for a class of the user's own that cannot be opened.
    """
    match algo:
        case GrpoSettings():
            return Grpo(algo)
        case GspoSettings():
            return Gspo(algo)
        case SftSettings():
            return Sft()
        case EspoSettings():
            from megatron_rl.losses.espo import (
                Espo,  # loads the kernels, which the other losses do without
            )

            return Espo(algo, vocab_size=shape.vocab_size)
        case CustomAlgoSettings():
            return UserLoss(
                algo.name,
                load_plugin(
                    "algo.name", algo.name, algo.options, methods={"prepare": ("response",)}
                ),
            )
    raise TypeError(f"{type(algo).__name__}: there is no loss for these settings")
