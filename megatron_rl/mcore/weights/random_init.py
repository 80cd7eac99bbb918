"""Initializes the weights of a model that starts from scratch, independent of the layout.

Megatron initializes the tensors of a rank in the order in which it builds them. Expert-parallel
ranks then get the same experts, and pipeline stages the same layers
(`tests/mcore/test_parallel.py`). Here each parameter has its own random generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_rl.mcore.weights.layout import ParameterLayout
from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.names import Fusion
from megatron_rl.models.shape import ModelShape


@torch.no_grad()
def initialize_hf_weights(
    models: Sequence[torch.nn.Module], shape: ModelShape, *, seed: int
) -> None:
    """Fill the models' parameters with random weights of Megatron's distributions.

    Norms keep their ones. The weights depend on the seed and the parameter's Hugging Face name
    alone, not on ranks.
    """
    config = get_model_config(models[0])
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    for parameter in placed_parameters(models, shape):
        if parameter.weight.ndim == 1:
            continue
        layout = parameter.layout(ep_rank)
        rows, columns = parameter.whole_shape(layout)
        if layout.fusion is Fusion.VOCABULARY:
            rows = shape.vocab_size
        whole = torch.empty(rows, columns)
        initialize = _init_method(config, layout)
        initialize(whole, generator=_generator(seed, layout.hf_names[0]))
        parameter.weight.copy_(parameter.part_of(whole, layout))


def _init_method(config: Any, layout: ParameterLayout) -> Any:
    """Return Megatron's initialization for a parameter."""
    if layout.fusion is Fusion.COLUMNS:  # its output is added to the residual stream
        return config.output_layer_init_method
    if "embed" in layout.hf_names[0]:
        return config.embedding_init_method
    return config.init_method


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
