"""The public function `token_logprob_entropy`: checks, then one backend.

    m = max_v x_v,  d_v = (x_v − m) / τ,  l = Σ exp d_v,  w = Σ d_v exp d_v
    logprob = d_target − log l,           entropy = log l − w / l

One pass over the logits (online softmax, Milakov & Gimelshein, arXiv 1805.02867). Backward
recomputes p_v = exp(d_v − log l):  ∂logprob/∂x_v = (1[v = target] − p_v) / τ,  ∂entropy/∂x_v = −p_v
(log p_v + H) / τ.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from espo_kernels.arguments import (
    require_floating,
    require_integers,
    require_one_device,
    require_shape,
)
from espo_kernels.backends import Backend, checks_values, resolve_backend
from espo_kernels.token_logprob_entropy.recomputed import BackendKernels, RecomputedLogprobEntropy
from espo_kernels.token_logprob_entropy.reference import logprob_entropy_reference
from espo_kernels.token_logprob_entropy.vocabulary import vocabulary_shard

FLOAT32 = torch.finfo(torch.float32)


def token_logprob_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    entropy_grad: bool = False,
    inplace_backward: bool = False,
    check_values: bool | None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and H(p) of each token's softmax, in nats; the equations stand at the top of
    this module.

    Args:
        logits: [T, V] float16, bfloat16 or float32; accumulation is float32. With a tp_group, [T, V
            / ranks]: this rank's columns of the padded vocabulary, in rank order, equally many on
            each. −inf is probability 0.
        targets: [T] integers in [0, vocab_size), ids of the whole vocabulary, the same on every
            rank.
        temperature: τ > 0; 1 / τ is a normal float32.
        vocab_size: true vocabulary; later columns are padding. None: all columns.
        tp_group: ranks that share the vocabulary. One all-gather of [4, T] in forward, none in
            backward; results are bit-equal on all ranks, and backward expects the same upstream
            gradient on all.
        entropy_grad: whether gradient flows through the entropy too.
        inplace_backward: write the gradient over the logits (2 bytes per bfloat16 logit instead of
            4). The logits are lost; autograd refuses to use them again. Ignored by
            backend="reference".
        check_values, backend: see `espo_kernels`.

    Returns:
        (logprob[T], entropy[T]) float32 (float64 for float64 logits, which take the reference).

    Raises:
        ValueError or TypeError naming the argument. NaN or +inf logits, rows without a finite logit
        and targets outside the vocabulary raise where values are checked; otherwise they come out
        as NaN.
    """
    _check(logits, targets, temperature)
    shard = vocabulary_shard(logits.shape[1], vocab_size, temperature, tp_group)
    size = vocab_size or logits.shape[1] * (
        1 if tp_group is None else dist.get_world_size(tp_group)
    )
    selected_backend = resolve_backend(backend, logits, cpu_needs_numba=True)
    check = checks_values(logits, selected_backend, check_values)
    if check:
        _require_targets(targets, size)
    if selected_backend == "reference":
        logprob, entropy = logprob_entropy_reference(logits, targets, size, shard, entropy_grad)
    else:
        logprob, entropy = RecomputedLogprobEntropy.apply(
            logits,
            targets.contiguous(),
            shard,
            _kernels(selected_backend),
            entropy_grad,
            inplace_backward,
        )
    if check:
        _require_finite_logits(entropy)
    return logprob, entropy


def _check(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}: must be [T, V] with V > 0")
    require_floating("logits", logits)
    require_integers("targets", targets)
    require_shape("targets", targets, (logits.shape[0],), "logits")
    require_one_device(logits=logits, targets=targets)
    if not (temperature > 0 and FLOAT32.tiny <= 1 / temperature <= FLOAT32.max):
        raise ValueError(
            f"temperature={temperature}: must be finite and positive, "
            "with 1 / temperature within float32"
        )


def _kernels(backend: Backend) -> BackendKernels:
    if backend == "triton":
        from espo_kernels.token_logprob_entropy import triton_launch

        return BackendKernels(triton_launch.forward, triton_launch.backward)
    from espo_kernels.token_logprob_entropy import cpu

    return BackendKernels(cpu.forward, cpu.backward)


def _require_targets(targets: torch.Tensor, vocab_size: int) -> None:
    ids = targets.long()  # a narrow dtype would wrap the vocabulary's size
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if bad.numel():
        at = int(bad[0])
        raise ValueError(
            f"targets[{at}] is {int(targets[at])}: must be in [0, {vocab_size}), "
            "the true vocabulary"
        )


def _require_finite_logits(entropy: torch.Tensor) -> None:
    # NaN and +inf anywhere in a row reach its entropy, so the logits need no pass of their own.
    bad = (~torch.isfinite(entropy)).nonzero()
    if bad.numel():
        raise ValueError(
            f"logits[{int(bad[0])}] has NaN or +inf, or no finite entry, in its true vocabulary: "
            "the model has diverged, skip the step"
        )
