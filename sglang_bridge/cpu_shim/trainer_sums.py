"""A CPU engine's sums in the order that Megatron adds them, so that both get the same float32
numbers.

Two things make the difference. MKL adds up a product of one to three rows differently from those of
four and more, so that a row's result depends on how many others are computed with it: few rows are
padded. And SGLang weighs experts in another place than Megatron does. `docs/on_policy.md` has what
is equal since, and what is not.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

FEWEST_ROWS = 4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] @ weight [out, in]: a row's result whatever the other rows are."""
    rows = x.shape[0]
    if x.ndim != 2 or rows == 0 or rows >= FEWEST_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, FEWEST_ROWS - rows)), weight, bias)[:rows]


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Megatron's order: weighed before the second product, added from the first expert to the last.

    x: [rows, hidden]. gate_up: [experts, 2 * inner, hidden]. down: [experts, hidden, inner].
    weights, ids: [rows, k].
    """
    ids = ids.long()
    if ids.shape[1] > 2:  # two are added alike either way
        ids, order = ids.sort(dim=1)
        weights = weights.gather(1, order)
    place = ids.view(-1).argsort()
    counts = torch.bincount(ids.view(-1), minlength=len(down)).tolist()
    gate, up = _by_expert(x[place // ids.shape[1]], gate_up, counts).chunk(2, dim=-1)
    answers = x.new_empty(place.shape[0], x.shape[1])
    answers[place] = _by_expert(F.silu(gate) * up * weights.view(-1)[place, None], down, counts)
    return answers.view(*ids.shape, -1).sum(dim=1)


def _by_expert(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Products of the first counts[0] rows with the first expert's weight [out, in], of the next
    with the second's.
    """
    parts = [linear(part, weight[e]) for e, part in enumerate(rows.split(counts)) if len(part)]
    return torch.cat(parts) if parts else rows.new_empty(0, weight.shape[1])


def route(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best experts and their weights, which add up to 1: a softmax over the chosen logits
    alone; int32 ids.
    """
    chosen, ids = logits.float().topk(topk, dim=-1)
    return chosen.softmax(dim=-1), ids.to(torch.int32)


def replace_linear(unquant: Any) -> None:
    """`sglang.srt.layers.quantization.unquant`: every product with a weight but the last and those
    of experts.
    """
    unquant.F = _with_linear(unquant.F)


def replace_lm_head(logits_processor: Any) -> None:
    """`sglang.srt.layers.logits_processor`, which multiplies by itself."""
    processor = logits_processor.LogitsProcessor
    original = processor._compute_lm_head

    def compute(self: Any, hidden_states: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        rows = hidden_states.shape[0]
        if not 0 < rows < FEWEST_ROWS:
            return original(self, hidden_states, *rest, **options)
        options.pop("out", None)
        return original(
            self, F.pad(hidden_states, (0, 0, 0, FEWEST_ROWS - rows)), *rest, **options
        )[:rows]

    processor._compute_lm_head = compute


def replace_experts(fused_moe_native: Any) -> None:
    """`sglang.srt.layers.moe.fused_moe_native`: experts without biases and with SwiGLU."""
    original = fused_moe_native.moe_forward_native

    def forward(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        plain = (
            config.activation == "silu"
            and config.gemm1_alpha is None
            and not config.apply_router_weight_on_input
        )
        if not plain or any(
            name.endswith("_bias") for name, _ in layer.named_parameters(recurse=False)
        ):
            return original(layer, x, topk_output, config)
        weights, ids, _ = topk_output
        return experts(x, layer.w13_weight, layer.w2_weight, weights.to(x.dtype), ids)

    fused_moe_native.moe_forward_native = forward


def replace_routing(topk: Any) -> None:
    """`sglang.srt.layers.moe.topk`: softmax routers whose weights are made to add up to 1."""
    original = topk.fused_topk_native

    def fused_topk(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if (
            given["renormalize"]
            and given["scoring_func"] == "softmax"
            and given["correction_bias"] is None
        ):
            return route(given["gating_output"], given["topk"])
        return original(**given)

    topk.fused_topk_native = fused_topk


def replace_logprobs(sampler: Any) -> None:
    """`sglang.srt.layers.sampler`: log-probabilities in double precision, not the logarithm of
    float32 probabilities.

    In float32 the sum over a vocabulary of 32,000 alone costs 2e-6.
    """
    original = sampler.Sampler.forward

    def forward(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        *rest: Any,
        **given: Any,
    ) -> Any:
        if return_logprob and given.get("logprob_logits") is None:
            given["logprob_logits"] = logits_output.next_token_logits.double()
        return original(self, logits_output, sampling_info, return_logprob, *rest, **given)

    sampler.Sampler.forward = forward


def _with_linear(functional: ModuleType) -> ModuleType:
    """torch.nn.functional with our `linear`, for one module alone."""
    copy = ModuleType(functional.__name__)
    vars(copy).update(vars(functional))
    copy.linear = linear  # type: ignore[attr-defined]
    return copy
