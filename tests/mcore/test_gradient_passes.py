"""Passes of an optimizer step over the gradients, and what all ranks wait for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.mcore.replayed_models import build, train_pass
from tests.mcore.test_optimizer import adam

# Operations whose first argument is only written
_WRITES = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_")


class GradientReads(TorchDispatchMode):
    """Counts the elements that operations read from the gradients of DDP models.

    Attributes:
    elements: by operation. reductions: over ranks. waits: of the host, for a number of a tensor.
    """

    def __init__(self, models: list[Any]) -> None:
        super().__init__()
        buffers = [
            buffer
            for model in models
            for buffer in (*model.buffers, *model.expert_parallel_buffers)
        ]
        self._storages = {buffer.grad_data.untyped_storage().data_ptr() for buffer in buffers}
        self.num_gradients = sum(
            parameter.numel() for model in models for parameter in model.parameters()
        )
        self.elements: Counter[str] = Counter()
        self.reductions = 0
        self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reductions += func._schema.name == "c10d::allreduce_"
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        name = func._schema.name
        inputs = args[1:] if name in _WRITES else args
        if not _is_view(func):
            self.elements[name] += sum(
                leaf.numel()
                for leaf in tree_leaves((inputs, kwargs or {}))
                if isinstance(leaf, torch.Tensor)
                and leaf.untyped_storage().data_ptr() in self._storages
            )
        return func(*args, **(kwargs or {}))

    @property
    def passes(self) -> dict[str, float]:
        """Reads of all gradients, by operation."""
        return {name: n / self.num_gradients for name, n in self.elements.items() if n}


def _is_view(func: Any) -> bool:
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in func._schema.returns
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("clip_grad", "clips"), [(1e-3, True), (1e9, False)])
def test_a_step_reads_the_gradients_once_before_it_clips_and_applies_them(
    megatron: Any, checkpoint: Path, clip_grad: float, clips: bool, dtype: str
) -> None:
    models, replay = build(checkpoint, dtype=dtype)
    optimizer = adam(models, clip_grad=clip_grad)
    train_pass(models, replay)
    with GradientReads(models) as reads:
        result = optimizer.step(loss_is_finite=True, max_norm=1e6)
    assert result.is_applied
    passes = dict(reads.passes)
    adam_passes = {
        name: passes.pop(name) for name in ("aten::_foreach_lerp_", "aten::_foreach_addcmul_")
    }
    assert list(adam_passes.values()) == [1.0, 2.0]
    clipping = {"aten::_foreach_mul_": 1.0} if clips else {}
    assert passes == {"aten::_foreach_norm": 1.0} | clipping
    # The norm, and the agreement of all ranks
    assert (reads.reductions, reads.waits) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_is_not_applied_reads_the_gradients_once(
    megatron: Any, checkpoint: Path, dtype: str
) -> None:
    models, replay = build(checkpoint, dtype=dtype)
    optimizer = adam(models)
    for loss_is_finite, max_norm in ((False, None), (True, 1e-9)):
        train_pass(models, replay)
        with GradientReads(models) as reads:
            result = optimizer.step(loss_is_finite=loss_is_finite, max_norm=max_norm)
        assert not result.is_applied
        assert reads.passes == {"aten::_foreach_norm": 1.0}
        assert (reads.reductions, reads.waits) == (2, 2)
