"""SGLang's torch-native attention backend with its loop over sequences replaced where that is possible.

Invariant: same inputs, same cache, same results up to rounding; whatever this does not cover goes to SGLang's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_bridge.cpu_shim.padded_attention import decode_attention


class BatchedTorchNativeBackend(TorchNativeAttnBackend):
    """Decodes all sequences at once. Its parent calls attention once per sequence and layer: most of a step's time."""

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Any:
        if encoder_lens is not None or is_cross_attn or causal or sliding_window_size is not None:
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
        output.copy_(decode_attention(query, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scale=scaling))
        return output
