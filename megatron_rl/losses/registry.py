"""Opens the loss that the configuration names."""

from __future__ import annotations

from megatron_rl.config.algorithms import (
    AlgoSettings,
    CispoSettings,
    CustomAlgoSettings,
    EspoSettings,
    GrpoSettings,
    GspoSettings,
    SftSettings,
)
from megatron_rl.contracts.plugins import load_plugin
from megatron_rl.losses.cispo import Cispo
from megatron_rl.losses.grpo import Grpo
from megatron_rl.losses.gspo import Gspo
from megatron_rl.losses.interface import PolicyLoss
from megatron_rl.losses.sft import Sft
from megatron_rl.losses.user_loss import UserLoss
from megatron_rl.models.shape import ModelShape


def open_loss(algo: AlgoSettings, shape: ModelShape) -> PolicyLoss:
    """Open the loss that `algo.name` selects.

    Raises `PluginError` for an invalid user-defined loss.
    """
    match algo:
        case GrpoSettings():
            return Grpo(algo)
        case GspoSettings():
            return Gspo(algo)
        case CispoSettings():
            return Cispo(algo)
        case SftSettings():
            return Sft()
        case EspoSettings():
            # Importing the kernels takes time, and no other loss needs them.
            from megatron_rl.losses.espo import Espo

            return Espo(algo, vocab_size=shape.vocab_size)
        case CustomAlgoSettings():
            methods = {"prepare": ("response",)}
            loss = load_plugin("algo.name", algo.name, algo.options, methods=methods)
            return UserLoss(algo.name, loss, algo.options)
    raise TypeError(f"{type(algo).__name__}: there is no loss for these settings")
