"""Recorder of the layers of Megatron's model, under the names of `engine_layers`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rl.mcore.weights.parameters import unwrap
from megatron_rl.models.shape import ModelShape

Convert = Callable[[torch.Tensor], torch.Tensor]


class _Recorder:
    """Records the results of operations.

    results: [rows, ...] by operation.
    """

    def __init__(self) -> None:
        self.results: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []

    def record(
        self, name: str, module: torch.nn.Module, convert: Convert = lambda tensor: tensor
    ) -> None:
        """Record the output of a module."""

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            value = output if isinstance(output, torch.Tensor) else output[0]
            rows = value.detach().reshape(-1, value.shape[-1])
            self.results[name] = convert(rows)

        self._handles.append(module.register_forward_hook(hook))

    def record_rotary(self, prefix: str, attention: torch.nn.Module) -> None:
        """Record query and key of an attention, after the rotary embedding."""

        def hook(module: torch.nn.Module, inputs: Any, options: Any) -> None:
            query, key = inputs[:2]
            self.results[f"{prefix}rotary q"] = query.flatten(1)
            self.results[f"{prefix}rotary k"] = key.flatten(1)

        self._handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))

    def record_gating(self, name: str, router: Any) -> None:
        """Record the logits of a router, which is no module's output."""
        gating = router.gating

        def recording_gating(states: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = gating(states)
            self.results[name] = logits.detach().flatten(0, -2)
            return logits

        router.gating = recording_gating

    def remove_hooks(self) -> None:
        """Remove all hooks on modules."""
        for handle in self._handles:
            handle.remove()


@contextlib.contextmanager
def record_layers(model: torch.nn.Module, shape: ModelShape) -> Iterator[dict[str, torch.Tensor]]:
    """Record every operation [rows, ...] of one forward pass within the block.

    The rank must hold the whole model.
    """
    chunk: Any = unwrap(model)
    recorder = _Recorder()
    for number, layer in enumerate(chunk.decoder.layers):
        _record_layer(recorder, f"{number}/", layer, shape)
    recorder.record("last norm", chunk.decoder.final_layernorm)
    recorder.record("logits", chunk.output_layer)
    try:
        yield recorder.results
    finally:
        recorder.remove_hooks()
        for layer in chunk.decoder.layers:
            del layer.mlp.router.gating


def _record_layer(recorder: _Recorder, prefix: str, layer: Any, shape: ModelShape) -> None:
    attention = layer.self_attention
    recorder.record(f"{prefix}norm before attention", layer.input_layernorm)
    recorder.record(f"{prefix}qkv", attention.linear_qkv, lambda value: _separate_qkv(value, shape))
    recorder.record_rotary(prefix, attention.core_attention)
    recorder.record(f"{prefix}attention", attention.core_attention)
    recorder.record(f"{prefix}output projection", attention.linear_proj)
    recorder.record(f"{prefix}norm before experts", layer.pre_mlp_layernorm)
    recorder.record(f"{prefix}experts' weights", layer.mlp.router)
    recorder.record_gating(f"{prefix}router logits", layer.mlp.router)
    recorder.record(f"{prefix}experts", layer.mlp)


def _separate_qkv(value: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Reorder query, key and value as an engine has them: one after the other.

    Megatron interleaves them by group.
    """
    groups = shape.num_key_value_heads
    queries = shape.num_attention_heads // groups
    interleaved_groups = value.view(len(value), groups, queries + 2, shape.head_dim)
    parts = interleaved_groups.split([queries, 1, 1], dim=2)
    return torch.cat([part.flatten(1) for part in parts], dim=1)
