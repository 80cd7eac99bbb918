"""Writes down what the layers of a real engine compute: hooks for SGLang's `--forward-hooks`, run
in the server.

`arguments` makes the server's option; every forward pass becomes one file in the directory,
{operation: [rows, ...]}.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# by operation: the module of a layer in SGLang, and what of a call's inputs and output is looked at
_LAYER: dict[str, tuple[str, Callable[[Any, Any], torch.Tensor]]] = {
    "norm before attention": ("input_layernorm", lambda inputs, output: _first(output)),
    "qkv": ("self_attn.qkv_proj", lambda inputs, output: _first(output)),
    "rotary q": ("self_attn.attn", lambda inputs, output: inputs[0]),
    "rotary k": ("self_attn.attn", lambda inputs, output: inputs[1]),
    "attention": ("self_attn.attn", lambda inputs, output: output),
    "output projection": ("self_attn.o_proj", lambda inputs, output: _first(output)),
    "norm before experts": ("post_attention_layernorm", lambda inputs, output: _first(output)),
    "router logits": ("mlp.gate", lambda inputs, output: _first(output)),
    "experts' weights": ("mlp.topk", lambda inputs, output: output.topk_weights),
    "experts' ids": ("mlp.topk", lambda inputs, output: output.topk_ids),
    "experts": ("mlp.experts", lambda inputs, output: output),
}
_BATCH, _LOGITS = "batch", "logits"

_pass: dict[
    str, torch.Tensor
] = {}  # of the server's only scheduler process, between two passes empty
_count = itertools.count()


def arguments(directory: Path, num_layers: int) -> list[str]:
    """Options of a server whose every forward pass is written to `directory`, prefixes computed
    anew each time.
    """
    wanted = {
        f"{layer}/{name}": f"model.layers.{layer}.{module}"
        for layer in range(num_layers)
        for name, (module, _) in _LAYER.items()
    }
    wanted |= {"last norm": "model.norm", _BATCH: "model", _LOGITS: "logits_processor"}
    hooks = [
        {
            "name": name,
            "target_modules": [module],
            "hook_factory": f"{__name__}:hook",
            "config": {"name": name, "directory": str(directory)},
        }
        for name, module in wanted.items()
    ]
    return [f"--forward-hooks={json.dumps(hooks)}", "--disable-radix-cache"]


def hook(config: dict[str, str]) -> Callable[[torch.nn.Module, Any, Any], None]:
    """A forward hook that keeps one operation's result; that of the logits writes all of the pass."""
    name = config["name"]

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if name == _BATCH:
            _pass.update(_rows(inputs[0], inputs[1], inputs[2]))
        elif name == _LOGITS:
            logits = output.next_token_logits.clone()
            torch.save(
                {**_pass, _LOGITS: logits}, Path(config["directory"]) / f"{next(_count):06d}.pt"
            )
            _pass.clear()
        else:
            layer, _, operation = name.rpartition("/")
            look = _LAYER[operation][1] if layer else lambda inputs, output: _first(output)
            _pass[name] = look(inputs, output).detach().clone()

    return keep


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _rows(ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
    """Of every row: its token, its position, the engine's slot of its request; and how many rows
    each request has.
    """
    counts = (
        torch.ones_like(batch.seq_lens) if batch.extend_seq_lens is None else batch.extend_seq_lens
    )
    return {"ids": ids, "positions": positions, "slots": batch.req_pool_indices, "counts": counts}
