"""Stands in for SGLang's compiled kernels, which need AMX and are not published for CPUs."""

from typing import Any, NoReturn

__version__ = "0.0.0+torch_native"

_SPECULATIVE_ONLY = frozenset(
    {
        "assign_draft_cache_locs_contiguous_cpu",
        "assign_extend_cache_locs_cpu",
        "build_tree_kernel_efficient_cpu",
        "copy_all_layer_kv_cache_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "rotate_input_ids_cpu",
        "verify_tree_greedy_cpu",
    }
)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: int,
) -> None:
    """Write the cache slots of each request's new tokens into its row.

    req_to_token[request, start:end] = slots.
    """
    offset = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        slots = out_cache_loc[offset : offset + end - start]
        req_to_token[request, start:end] = slots.to(req_to_token.dtype)
        offset += end - start


def __getattr__(name: str) -> Any:
    if name not in _SPECULATIVE_ONLY:
        raise AttributeError(f"module 'sgl_kernel' (CPU stand-in) has no attribute {name!r}")

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} serves speculative decoding, which this CPU stand-in lacks"
        )

    return refuse
