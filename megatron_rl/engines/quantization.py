"""The quantization of the engines of a run, and the GPUs on which it is supported."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.fp8_weights import quantization_config
from megatron_rl.models.shape import ModelShape

# SGLang 0.5.23 repacks FP8 weights and scales on other GPUs when it starts, and has no way back
# into the layout in which new weights arrive.
_OLDEST = (8, 9)
_TOO_NEW = (10, 0)


def engine_quantization(engine: EngineSettings, shape: ModelShape) -> dict[str, Any] | None:
    """Return the `quantization_config` of the engines, None for unquantized ones."""
    if engine.quantization is None:
        return None
    return quantization_config(
        shape,
        unquantized_first=engine.unquantized_first_layers,
        unquantized_last=engine.unquantized_last_layers,
    )


def require_fp8_gpu(capability: tuple[int, int], name: str) -> None:
    """Raise `Failure` for a GPU on which SGLang keeps FP8 weights in a layout of its own.

    capability: CUDA's compute capability. name: of the GPU, for people.
    """
    if _OLDEST <= capability < _TOO_NEW:
        return
    number = f"{capability[0]}.{capability[1]}"
    if capability < _OLDEST:
        reason = "it has no FP8 products, and SGLang packs the weights for its Marlin kernel"
    else:
        reason = (
            "SGLang turns float32 scales into packed powers of two there (DeepGEMM), and does not "
            "turn later ones"
        )
    raise Failure(
        f"engine.quantization=fp8: {name} has compute capability {number}: {reason}. Use GPUs with "
        "8.9 or 9.0, such as L40S, H100 or H200, or engine.quantization=null",
        ExitCode.REFUSED,
    )
