"""Runs block-FP8 models on CPUs without AMX, whose kernels SGLang asks for.

Only the products are replaced: parameters, their loaders, update sessions and checksums stay
SGLang's. Weights stay in FP8. A product multiplies their values in float32, codes times scales, and
rounds its input as the GPU's kernels do, unless SGLANG_BRIDGE_ROUND_ACTIVATIONS=0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_bridge.cpu_shim.trainer_sums import experts, linear

_GROUP = 128
_FP8_MAX = 448.0
_SMALLEST = 1e-10  # SGLang's least maximum of a group (`per_token_group_quant_fp8`)
# The values of all codes. A look-up is faster than torch's conversion.
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()

Rounding = Callable[[torch.Tensor], torch.Tensor]


def dequantize(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the weights [..., M, N] in float32.

    codes: e4m3 [..., M, N]. scales: float32 [..., ⌈M/block[0]⌉, ⌈N/block[1]⌉].
    """
    *_, M, N = codes.shape
    scale = scales.repeat_interleave(block[0], -2)[..., :M, :]
    return _VALUES[codes.view(torch.uint8).int()] * scale.repeat_interleave(block[1], -1)[..., :N]


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """Round each 128 numbers of a row to e4m3 with a scale of their own, and return float32.

    x: [rows, columns].
    """
    rows, columns = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -columns % _GROUP)).view(rows, -1, _GROUP)
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST) / _FP8_MAX
    codes = (groups / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).view(rows, -1)[:, :columns]


def selected_rounding() -> Rounding:
    """The rounding of a product's input that the environment asks for."""
    if os.environ.get("SGLANG_BRIDGE_ROUND_ACTIVATIONS", "1") == "0":
        return torch.Tensor.float
    return round_activations


def replace_products(fp8: Any) -> None:
    """Replace the products of `sglang.srt.layers.quantization.fp8`."""
    rounding = selected_rounding()
    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod):
        method.process_weights_after_loading_block_quant = _leave_weights
    fp8.Fp8LinearMethod.apply = _linear_product(rounding)
    fp8.Fp8MoEMethod.create_moe_runner = _skip_runner
    fp8.Fp8MoEMethod.apply = _expert_products(rounding)
    supported_dtypes = fp8.Fp8Config.get_supported_act_dtypes
    fp8.Fp8Config.get_supported_act_dtypes = classmethod(
        lambda cls: [*supported_dtypes(), torch.float32]
    )


def _leave_weights(self: Any, layer: Any) -> None:
    """Keep weights and scales as they were loaded."""
    if not self.block_quant or self.use_mxfp8:
        raise ValueError("CPU engines run FP8 with blocks of float32 scales only")


def _skip_runner(self: Any, layer: Any, moe_runner_config: Any) -> None:
    """Keep the configuration alone: a runner would launch GPU kernels."""
    self.moe_runner_config = moe_runner_config
    self.runner = None


def _linear_product(rounding: Rounding) -> Callable[..., torch.Tensor]:
    def apply(
        self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = dequantize(layer.weight, layer.weight_scale_inv, tuple(self.weight_block_size))
        rows = rounding(x.reshape(-1, x.shape[-1]))
        output = linear(rows, weight, None if bias is None else bias.float())
        return output.view(*x.shape[:-1], -1).to(x.dtype)

    return apply


def _expert_products(rounding: Rounding) -> Callable[..., Any]:
    def apply(self: Any, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        config = self.moe_runner_config
        if config.activation != "silu" or config.apply_router_weight_on_input:
            raise ValueError("CPU engines run FP8 experts with SwiGLU only")
        block = tuple(self.weight_block_size)
        x = dispatch_output.hidden_states
        weights, ids, _ = dispatch_output.topk_output
        output = experts(
            rounding(x),
            dequantize(layer.w13_weight, layer.w13_weight_scale_inv, block),
            dequantize(layer.w2_weight, layer.w2_weight_scale_inv, block),
            weights.float(),
            ids,
            rounding=rounding,
        )
        return StandardCombineInput(hidden_states=output.to(x.dtype))

    return apply


def list_codes_and_scales(weight_checker: Any) -> None:
    """Add codes and scales to the checksums of `sglang.srt.utils.weight_checker`.

    SGLang hashes the bfloat16 values that they stand for, and lists no scales. Different codes and
    scales may stand for the same values.
    """
    checker = weight_checker.WeightChecker
    original = checker._compute_checksum

    def compute(self: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        info: dict[str, Any] = original(self, *arguments, **options)
        state = dict(self._model_state())
        for name, weight in weight_checker._build_quantized_set(self._get_model()).items():
            codes = weight_checker._hash_tensor(state[name])
            scales = weight_checker._hash_tensor(state[weight.scale_name])
            info["checksums"] |= {f"{name}:codes": codes, weight.scale_name: scales}
        return info

    checker._compute_checksum = compute
