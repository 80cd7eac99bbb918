"""Activations are freed as soon as a backward pass no longer needs them."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore.replayed_models import build, train_pass


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_layer_keeps_its_input_after_a_step(
    megatron: Any, checkpoint: Path, recompute: Any, dtype: str
) -> None:
    """Megatron's dispatcher would keep it, with its gradient, until the layer's next pass."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    models, replay = build(checkpoint, recompute, dtype=dtype)
    inputs: list[weakref.ref[torch.Tensor]] = []
    for layer in models[0].modules():
        if isinstance(layer, TransformerLayer):
            layer.register_forward_pre_hook(
                lambda _, __, options: inputs.append(weakref.ref(options["hidden_states"])),
                with_kwargs=True,
            )
    train_pass(models, replay)
    assert inputs
    tensors = [reference() for reference in inputs]
    assert [tensor.shape for tensor in tensors if tensor is not None] == []
