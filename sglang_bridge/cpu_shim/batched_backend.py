"""SGLang's torch-native attention backend without its loop over sequences."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_bridge.cpu_shim.padded_attention import paged_attention


class BatchedTorchNativeBackend(TorchNativeAttnBackend):
    """Attends all sequences at once.

    The parent class attends once per sequence and layer, which takes most of a step's time. It
    still serves cross-attention, sliding windows and non-causal attention.
    """

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
        **options: Any,
    ) -> torch.Tensor:
        if not _is_covered(encoder_lens, options):
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                **options,
            )
        attention = paged_attention(
            query,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            torch.ones_like(seq_lens),
            scale=options["scaling"],
        )
        return output.copy_(attention)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if (
            not _is_covered(encoder_lens, options)
            or not options["causal"]
            or int(extend_seq_lens.min()) < 1
        ):
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                **options,
            )
        attention = paged_attention(
            query,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_seq_lens,
            scale=options["scaling"],
        )
        return output.copy_(attention)


def _is_covered(encoder_lens: torch.Tensor | None, options: dict[str, Any]) -> bool:
    return (
        encoder_lens is None
        and not options["is_cross_attn"]
        and options["sliding_window_size"] is None
    )
