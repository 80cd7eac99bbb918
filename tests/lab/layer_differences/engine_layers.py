"""Recorder of the layers of a real engine: hooks for SGLang's `--forward-hooks`.

The hooks run in the server. `server_options` makes the options of the server. Every forward pass
becomes one file {operation: [rows, ...]} in the directory.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Select = Callable[[Any, Any], torch.Tensor]


def _output(inputs: Any, output: Any) -> torch.Tensor:
    """The output of a call, or the first of several."""
    return output if isinstance(output, torch.Tensor) else output[0]


# For each operation of a layer: its module in SGLang, and the tensor of a call to record
_LAYER: dict[str, tuple[str, Select]] = {
    "norm before attention": ("input_layernorm", _output),
    "qkv": ("self_attn.qkv_proj", _output),
    "rotary q": ("self_attn.attn", lambda inputs, output: inputs[0]),
    "rotary k": ("self_attn.attn", lambda inputs, output: inputs[1]),
    "attention": ("self_attn.attn", lambda inputs, output: output),
    "output projection": ("self_attn.o_proj", _output),
    "norm before experts": ("post_attention_layernorm", _output),
    "router logits": ("mlp.gate", _output),
    "experts' weights": ("mlp.topk", lambda inputs, output: output.topk_weights),
    "experts' ids": ("mlp.topk", lambda inputs, output: output.topk_ids),
    "experts": ("mlp.experts", lambda inputs, output: output),
}
_BATCH = "batch"
_LOGITS = "logits"

# Operations of the current pass, in the only scheduler process of the server
_pass: dict[str, torch.Tensor] = {}
_pass_numbers = itertools.count()


def server_options(directory: Path, num_layers: int) -> list[str]:
    """Options of a server that writes every forward pass to `directory`.

    Prefixes are computed anew each time.
    """
    modules = {
        f"{layer}/{name}": f"model.layers.{layer}.{module}"
        for layer in range(num_layers)
        for name, (module, _) in _LAYER.items()
    }
    modules |= {"last norm": "model.norm", _BATCH: "model", _LOGITS: "logits_processor"}
    hooks = [
        {
            "name": name,
            "target_modules": [module],
            "hook_factory": f"{__name__}:make_hook",
            "config": {"name": name, "directory": str(directory)},
        }
        for name, module in modules.items()
    ]
    return [f"--forward-hooks={json.dumps(hooks)}", "--disable-radix-cache"]


def make_hook(config: dict[str, str]) -> Callable[[torch.nn.Module, Any, Any], None]:
    """Make the forward hook that records one operation.

    The hook of the logits writes the whole pass to a file.
    """
    name = config["name"]

    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if name == _BATCH:
            _pass.update(_describe_rows(inputs[0], inputs[1], inputs[2]))
        elif name == _LOGITS:
            _pass[_LOGITS] = output.next_token_logits.clone()
            torch.save(_pass, Path(config["directory"]) / f"{next(_pass_numbers):06d}.pt")
            _pass.clear()
        else:
            layer, _, operation = name.rpartition("/")
            select = _LAYER[operation][1] if layer else _output
            _pass[name] = select(inputs, output).detach().clone()

    return record


def _describe_rows(
    ids: torch.Tensor, positions: torch.Tensor, batch: Any
) -> dict[str, torch.Tensor]:
    """Token and position of every row, and slot and number of rows of every request."""
    counts = batch.extend_seq_lens
    if counts is None:
        counts = torch.ones_like(batch.seq_lens)
    return {"ids": ids, "positions": positions, "slots": batch.req_pool_indices, "counts": counts}
