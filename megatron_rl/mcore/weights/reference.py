"""A second set of weights of the model, in host memory, which one pass at a time can use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron_rl.mcore.weights.load import load_hf_weights
from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.shape import ModelShape


class ReferenceWeights:
    """This rank's share of frozen weights, with which the model's weights are exchanged.

    It takes as much host memory as the rank's weights. An exchange needs memory for one parameter
    more. The parameters keep their addresses, because Megatron's optimizer and its buffers share
    them.

    models: this rank's chunks. Their weights are copied.
    """

    def __init__(self, models: Sequence[torch.nn.Module], shape: ModelShape) -> None:
        parameters = placed_parameters(models, shape)
        self._weights = [parameter.weight.detach() for parameter in parameters]
        self._others = [_to_host(weight) for weight in self._weights]

    @classmethod
    def read(
        cls, models: Sequence[torch.nn.Module], shape: ModelShape, path: Path, *, key: str
    ) -> ReferenceWeights:
        """Read the weights of a checkpoint in Hugging Face format. The models keep their own.

        key: the setting that names `path`, for messages. Raises `Failure`.
        """
        reference = cls(models, shape)
        load_hf_weights(models, shape, path, key=key)
        reference._swap()  # the model holds the reference now, and the copy the model's weights
        return reference

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Give the model these weights within the context, and its own ones afterwards.

        Both are the same bits again at the end.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, other in zip(self._weights, self._others, strict=True):
            old_weight = weight.clone()
            weight.copy_(other, non_blocking=True)
            other.copy_(old_weight)


def _to_host(weight: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory, pinned if it comes from a GPU."""
    copy = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
    return copy.copy_(weight)
