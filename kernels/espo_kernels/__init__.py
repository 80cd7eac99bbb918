"""Fused kernels for ESPO (entropy-grouped policy optimisation) and for FP8 rollout weights.

    token_logprob_entropy     log-probability and entropy of each token, without a softmax in memory
    espo_groups               entropy groups and clip widths, once per rollout batch
    espo_policy_loss          the objective, its gradient and its diagnostics
    quantize_fp8_blockwise    e4m3 weights with one scale per block

`backend` is "auto" (Triton on CUDA tensors, compiled CPU code on CPU tensors), "reference", "cpu"
or "triton". `check_values` says whether bad values raise (True) or come out as NaN (False, which
never looks at them and never leaves memory). None: they raise where looking needs no host
synchronisation, which is on CPU tensors and in the reference (so for float64 on any device), and in
the Triton kernels when the environment variable `ESPO_KERNELS_DEBUG` is 1 (read at each call).
Quantisation decides as for None.
"""

from espo_kernels.espo_groups import EspoGroups, espo_groups
from espo_kernels.espo_policy_loss import EspoMetrics, EspoResult, espo_policy_loss
from espo_kernels.quantize_fp8_blockwise import quantize_fp8_blockwise
from espo_kernels.token_logprob_entropy import token_logprob_entropy

__all__ = [
    "EspoGroups",
    "EspoMetrics",
    "EspoResult",
    "espo_groups",
    "espo_policy_loss",
    "quantize_fp8_blockwise",
    "token_logprob_entropy",
]
