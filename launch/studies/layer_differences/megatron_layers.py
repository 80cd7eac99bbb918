"""Records the results of the layers of Megatron's model, under the names of `engine_layers`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rl.mcore.weights.parameters import unwrap
from megatron_rl.models.shape import ModelShape

Results = dict[str, torch.Tensor]


@contextlib.contextmanager
def watch(model: torch.nn.Module, shape: ModelShape) -> Iterator[Results]:
    """Record the result [rows, ...] of every operation of one forward pass in the block, by name.

    The rank must hold the whole model, and every layer must have experts.
    """
    chunk: Any = unwrap(model)
    recorder = _Recorder(shape)
    for number, layer in enumerate(chunk.decoder.layers):
        recorder.add_layer(f"{number}/", layer)
    recorder.add("last norm", chunk.decoder.final_layernorm)
    recorder.add("logits", chunk.output_layer)
    try:
        yield recorder.results
    finally:
        recorder.remove_hooks()
        for layer in chunk.decoder.layers:
            del layer.mlp.router.gating


class _Recorder:
    """Hooks that write the results of modules to `results`."""

    def __init__(self, shape: ModelShape) -> None:
        self.results: Results = {}
        self._shape = shape
        self._handles: list[Any] = []

    def add_layer(self, prefix: str, layer: Any) -> None:
        """Record the operations of a decoder layer."""
        attention = layer.self_attention
        self.add(f"{prefix}norm before attention", layer.input_layernorm)
        self.add(f"{prefix}qkv", attention.linear_qkv, self._split_by_kind)
        self._add_rotary(prefix, attention.core_attention)
        self.add(f"{prefix}attention", attention.core_attention)
        self.add(f"{prefix}output projection", attention.linear_proj)
        self.add(f"{prefix}norm before experts", layer.pre_mlp_layernorm)
        self.add(f"{prefix}experts' weights", layer.mlp.router)
        self._add_gating(f"{prefix}router logits", layer.mlp.router)
        self.add(f"{prefix}experts", layer.mlp)

    def add(
        self,
        name: str,
        module: torch.nn.Module,
        convert: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> None:
        """Record the output of a module; `convert` takes its rows [rows, size]."""

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            value = output if isinstance(output, torch.Tensor) else output[0]
            self.results[name] = convert(value.detach().reshape(-1, value.shape[-1]))

        self._handles.append(module.register_forward_hook(hook))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _add_rotary(self, prefix: str, core_attention: torch.nn.Module) -> None:
        """Record queries and keys after the rotary embedding."""

        def hook(module: torch.nn.Module, inputs: Any, options: Any) -> None:
            query, key = inputs[:2]
            self.results[f"{prefix}rotary q"] = query.flatten(1)
            self.results[f"{prefix}rotary k"] = key.flatten(1)

        handle = core_attention.register_forward_pre_hook(hook, with_kwargs=True)
        self._handles.append(handle)

    def _add_gating(self, name: str, router: Any) -> None:
        """Record the router's logits. Its method `gating` is no module and takes no hook."""
        gating = router.gating

        def gating_with_record(rows: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = gating(rows)
            self.results[name] = logits.detach().flatten(0, -2)
            return logits

        router.gating = gating_with_record

    def _split_by_kind(self, rows: torch.Tensor) -> torch.Tensor:
        """Order rows of qkv by queries, keys and values, as engines do.

        Megatron interleaves them by query group.
        """
        groups = self._shape.num_key_value_heads
        queries = self._shape.num_attention_heads // groups
        by_group = rows.view(len(rows), groups, queries + 2, self._shape.head_dim)
        parts = by_group.split([queries, 1, 1], dim=2)
        return torch.cat([part.flatten(1) for part in parts], dim=1)
