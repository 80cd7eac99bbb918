"""Writes down what the layers of Megatron's model compute, under the names of
`support.engine_layers`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rl.mcore.weights.parameters import unwrap
from megatron_rl.models.shape import ModelShape


@contextlib.contextmanager
def watch(model: torch.nn.Module, shape: ModelShape) -> Iterator[dict[str, torch.Tensor]]:
    """Every operation's result [rows, ...] of one forward pass within, on one rank that holds the
    whole model.
    """
    seen: dict[str, torch.Tensor] = {}
    chunk: Any = unwrap(model)
    handles = []

    def keep(
        name: str,
        module: torch.nn.Module,
        form: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    ) -> None:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            value = output if isinstance(output, torch.Tensor) else output[0]
            seen[name] = form(value.detach().reshape(-1, value.shape[-1]))

        handles.append(module.register_forward_hook(hook))

    for number, layer in enumerate(chunk.decoder.layers):
        at, attention = f"{number}/", layer.self_attention
        keep(f"{at}norm before attention", layer.input_layernorm)
        keep(f"{at}qkv", attention.linear_qkv, lambda value: _plain_qkv(value, shape))
        handles.append(
            attention.core_attention.register_forward_pre_hook(_rotated(seen, at), with_kwargs=True)
        )
        keep(f"{at}attention", attention.core_attention)
        keep(f"{at}output projection", attention.linear_proj)
        keep(f"{at}norm before experts", layer.pre_mlp_layernorm)
        keep(f"{at}experts' weights", layer.mlp.router)
        _watch_gating(layer.mlp.router, seen, f"{at}router logits")
        keep(f"{at}experts", layer.mlp)
    keep("last norm", chunk.decoder.final_layernorm)
    keep("logits", chunk.output_layer)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for layer in chunk.decoder.layers:
            del layer.mlp.router.gating


def _rotated(seen: dict[str, torch.Tensor], at: str) -> Any:
    def hook(module: torch.nn.Module, inputs: Any, named: Any) -> None:
        query, key = inputs[:2]
        seen[f"{at}rotary q"], seen[f"{at}rotary k"] = query.flatten(1), key.flatten(1)

    return hook


def _watch_gating(router: Any, seen: dict[str, torch.Tensor], name: str) -> None:
    gating = router.gating

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = gating(hidden)
        seen[name] = logits.detach().flatten(0, -2)
        return logits

    router.gating = watched


def _plain_qkv(value: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Megatron interleaves query, key and value by group; an engine has them one after the other."""
    groups, dim = shape.num_key_value_heads, shape.head_dim
    shared = shape.num_attention_heads // groups
    parts = value.view(len(value), groups, shared + 2, dim).split([shared, 1, 1], dim=2)
    return torch.cat([part.flatten(1) for part in parts], dim=1)
