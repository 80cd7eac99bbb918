"""Draws the weights of a model that starts from scratch: the same model whatever the layout.

Megatron draws what a rank holds, in the order it is built: expert-parallel ranks draw the same
experts, and pipeline stages the same layers (`tests/mcore/test_parallel.py`). Here each parameter
has a generator of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.names import Fusion
from megatron_rl.models.shape import ModelShape


@torch.no_grad()
def draw_hf_weights(models: Sequence[torch.nn.Module], shape: ModelShape, *, seed: int) -> None:
    """Fill the models' parameters with random weights of Megatron's distributions.

    Norms keep their ones.
    """
    config = get_model_config(models[0])
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    for parameter in placed_parameters(models, shape):
        if parameter.weight.ndim == 1:
            continue
        layout = parameter.layout(ep_rank)
        if layout.fusion is Fusion.COLUMNS:  # what adds to the residual stream
            draw = config.output_layer_init_method
        else:
            draw = (
                config.embedding_init_method
                if "embed" in layout.hf_names[0]
                else config.init_method
            )
        rows, columns = parameter.whole_shape(layout)
        full = torch.empty(
            shape.vocab_size if layout.fusion is Fusion.VOCABULARY else rows, columns
        )
        draw(full, generator=_generator(seed, layout.hf_names[0]))
        parameter.weight.copy_(parameter.part_of(full, layout))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
