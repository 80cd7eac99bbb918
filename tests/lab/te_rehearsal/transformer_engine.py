"""Imports Transformer Engine with stand-ins for its compiled functions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from tests.lab.te_rehearsal.compiled.call_log import CallLog
from tests.lab.te_rehearsal.pretended_cuda import PretendedCuda


@dataclass(frozen=True)
class Rehearsal:
    """The pretended GPU of this process, and the calls of compiled functions."""

    cuda: PretendedCuda
    calls: CallLog


def start() -> Rehearsal:
    """Import Transformer Engine and replace its compiled functions. Call it once a process."""
    cuda = PretendedCuda()
    import transformer_engine.pytorch  # noqa: F401 - it loads the extension

    from tests.lab.te_rehearsal.compiled import (
        attention,
        matrix_products,
        norms,
        optimizer_steps,
        quantizers,
    )

    extension: Any = sys.modules["transformer_engine_torch"]
    stand_ins: dict[str, Any] = {
        "get_fused_attn_backend": attention.backend_of(extension, lambda: cuda.capability)
    }
    names = {
        attention: (
            "fused_attn_fwd",
            "fused_attn_bwd",
            "convert_thd_to_bshd",
            "convert_bshd_to_thd",
        ),
        matrix_products: (
            "generic_gemm",
            "te_general_grouped_gemm",
            "fused_multi_row_padding",
            "fused_multi_row_unpadding",
        ),
        quantizers: (
            "create_empty_quantized_tensor",
            "quantize",
            "split_quantize",
            "bgrad_quantize",
            "dequantize",
            "fp8_transpose",
        ),
        norms: ("rmsnorm_fwd", "rmsnorm_bwd", "fused_rope_forward", "fused_rope_backward"),
        optimizer_steps: ("multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale"),
    }
    for module, functions in names.items():
        stand_ins |= {name: getattr(module, name) for name in functions}
    return Rehearsal(cuda, CallLog(extension, stand_ins, lambda: cuda.is_on))
