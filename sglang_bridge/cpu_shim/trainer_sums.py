"""Computes a CPU engine's sums in Megatron's order, so that both get the same float32 numbers.

MKL adds up a product of few rows differently from a product of more rows. A row's result would
depend on the number of rows beside it, so products of few rows are padded. SGLang also
applies the experts' weights in another place than Megatron does. `docs/on_policy.md` lists what is
equal, and what is not.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from sglang_bridge.cpu_shim.small_products import pad_rows


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] @ weight [out, in]ᵀ, where a row's result does not depend on the other rows."""
    if x.ndim != 2:
        return F.linear(x, weight, bias)
    return F.linear(pad_rows(x), weight, bias)[: len(x)]


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    rounding: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Apply experts in Megatron's order: weights before the second product, sums in expert order.

    x: [rows, hidden]. gate_up: [experts, 2 * inner, hidden]. down: [experts, hidden, inner].
    weights, ids: [rows, k]. rounding: of the input of the second product, before it is weighted.
    """
    ids = ids.long()
    if ids.shape[1] > 2:  # the sum of two is the same in either order
        ids, order = ids.sort(dim=1)
        weights = weights.gather(1, order)
    place = ids.view(-1).argsort()
    counts = torch.bincount(ids.view(-1), minlength=len(down)).tolist()
    gate, up = _by_expert(x[place // ids.shape[1]], gate_up, counts).chunk(2, dim=-1)
    outputs = x.new_empty(place.shape[0], x.shape[1])
    inner = F.silu(gate) * up
    if rounding is not None:
        inner = rounding(inner)
    outputs[place] = _by_expert(inner * weights.view(-1)[place, None], down, counts)
    return outputs.view(*ids.shape, -1).sum(dim=1)


def _by_expert(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply rows, sorted by expert, with their expert's weight [out, in].

    counts: the number of rows of each expert.
    """
    parts = [linear(part, weight[e]) for e, part in enumerate(rows.split(counts)) if len(part)]
    return torch.cat(parts) if parts else rows.new_empty(0, weight.shape[1])


def route(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the top-k experts: their weights, which add up to 1, and their ids (int32).

    The weights are a softmax over the selected logits alone.
    """
    values, ids = logits.float().topk(topk, dim=-1)
    return values.softmax(dim=-1), ids.to(torch.int32)


def replace_linear(unquant: Any) -> None:
    """Replace products in `sglang.srt.layers.quantization.unquant`.

    These are all products with a weight, except the output layer's and the experts'.
    """
    unquant.F = _with_linear(unquant.F)


def replace_lm_head(logits_processor: Any) -> None:
    """Replace the output layer's product in `sglang.srt.layers.logits_processor`."""
    processor = logits_processor.LogitsProcessor
    original = processor._compute_lm_head

    def compute(self: Any, hidden_states: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        padded_states = pad_rows(hidden_states)
        if padded_states is hidden_states:
            return original(self, hidden_states, *rest, **options)
        options.pop("out", None)
        return original(self, padded_states, *rest, **options)[: len(hidden_states)]

    processor._compute_lm_head = compute


def replace_experts(fused_moe_native: Any) -> None:
    """Replace SwiGLU experts without biases in `sglang.srt.layers.moe.fused_moe_native`."""
    original = fused_moe_native.moe_forward_native

    def forward(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        is_swiglu = (
            config.activation == "silu"
            and config.gemm1_alpha is None
            and not config.apply_router_weight_on_input
        )
        names = [name for name, _ in layer.named_parameters(recurse=False)]
        if not is_swiglu or any(name.endswith("_bias") for name in names):
            return original(layer, x, topk_output, config)
        weights, ids, _ = topk_output
        return experts(x, layer.w13_weight, layer.w2_weight, weights.to(x.dtype), ids)

    fused_moe_native.moe_forward_native = forward


def replace_routing(topk: Any) -> None:
    """Replace softmax routers with renormalized weights in `sglang.srt.layers.moe.topk`."""
    original = topk.fused_topk_native

    def fused_topk(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if (
            options["renormalize"]
            and options["scoring_func"] == "softmax"
            and options["correction_bias"] is None
        ):
            return route(options["gating_output"], options["topk"])
        return original(**options)

    topk.fused_topk_native = fused_topk


def replace_logprobs(sampler: Any) -> None:
    """Compute log-probabilities of `sglang.srt.layers.sampler` in double precision.

    SGLang takes the logarithm of float32 probabilities. In float32, the sum over a vocabulary of
    32,000 alone has an error of 2e-6.
    """
    original = sampler.Sampler.forward

    def forward(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if return_logprob and options.get("logprob_logits") is None:
            options["logprob_logits"] = logits_output.next_token_logits.double()
        return original(self, logits_output, sampling_info, return_logprob, *rest, **options)

    sampler.Sampler.forward = forward


def _with_linear(functional: ModuleType) -> ModuleType:
    """Copy torch.nn.functional, with our `linear`, for one module alone."""
    copy = ModuleType(functional.__name__)
    vars(copy).update(vars(functional))
    copy.linear = linear  # type: ignore[attr-defined]
    return copy
