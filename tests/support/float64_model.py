"""Qwen3-MoE, dense Qwen3 and Mixtral in float64 and plain torch, one sequence at a time.

The module shares no code with the trainer's model, losses or training, so that whole steps can be
compared with it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# A dense layer among those with experts, an odd vocabulary and four key-value heads, so that every
# layout pads or splits something.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 51,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
# Keys that differ in the other families
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "mlp_only_layers": [0, 1, 2, 3],
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "intermediate_size": 24,
    "head_dim": 4,
    "mlp_only_layers": [],
}


def write_checkpoint(directory: Path, **changes: Any) -> Path:
    """Write a checkpoint with random float32 weights.

    changes: keys of `CONFIG` with other values.
    """
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(11)
    weights = {name: _random(shape, generator) for name, shape in _shapes(config).items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.2 * noise if len(shape) == 1 else noise / shape[1] ** 0.5


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, in the order in which they are generated."""
    embedding_shape = (config["vocab_size"], config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding_shape}
    for layer in range(config["num_hidden_layers"]):
        shapes |= _attention_shapes(config, f"model.layers.{layer}.")
        shapes |= _mlp_shapes(config, layer)
    shapes["model.norm.weight"] = (config["hidden_size"],)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = embedding_shape
    return shapes


def _attention_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's norms and attention."""
    hidden_size = config["hidden_size"]
    head_dim = config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}input_layernorm.weight": (hidden_size,),
        f"{prefix}post_attention_layernorm.weight": (hidden_size,),
    }
    if config["model_type"] != "mixtral":
        shapes[f"{prefix}self_attn.q_norm.weight"] = (head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
    shapes[f"{prefix}self_attn.q_proj.weight"] = (q_size, hidden_size)
    shapes[f"{prefix}self_attn.k_proj.weight"] = (kv_size, hidden_size)
    shapes[f"{prefix}self_attn.v_proj.weight"] = (kv_size, hidden_size)
    shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden_size, q_size)
    return shapes


def _mlp_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's dense MLP, or of its router and experts."""
    hidden_size = config["hidden_size"]
    is_dense = layer in config["mlp_only_layers"]
    is_mixtral = config["model_type"] == "mixtral"
    gate, up, down = _mlp_names(config)
    prefix = _mlp_prefix(config, layer)
    shapes: dict[str, tuple[int, ...]] = {}
    experts = [""]
    if not is_dense:
        shapes[f"{prefix}gate.weight"] = (config["num_experts"], hidden_size)
        experts = [f"experts.{expert}." for expert in range(config["num_experts"])]
    size = config["intermediate_size" if is_dense or is_mixtral else "moe_intermediate_size"]
    for expert in experts:
        shapes[f"{prefix}{expert}{gate}.weight"] = (size, hidden_size)
        shapes[f"{prefix}{expert}{up}.weight"] = (size, hidden_size)
        shapes[f"{prefix}{expert}{down}.weight"] = (hidden_size, size)
    return shapes


def _mlp_prefix(config: dict[str, Any], layer: int) -> str:
    name = "block_sparse_moe" if config["model_type"] == "mixtral" else "mlp"
    return f"model.layers.{layer}.{name}."


def _mlp_names(config: dict[str, Any]) -> tuple[str, str, str]:
    """Return the names of gate, up and down."""
    if config["model_type"] == "mixtral":
        return "w1", "w3", "w2"
    return "gate_proj", "up_proj", "down_proj"


@dataclass(frozen=True)
class Float64Model:
    """A model in float64.

    weights: leaves under Hugging Face names.
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    @classmethod
    def read(cls, checkpoint: Path) -> "Float64Model":
        """Read a checkpoint."""
        tensors = load_file(checkpoint / "model.safetensors")
        weights = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
        return cls(json.loads((checkpoint / "config.json").read_text()), weights)

    def logits(self, tokens: torch.Tensor, routes: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """Return the logits [n, vocabulary] of tokens [n].

        routes: [n, MoE layers, top-k], the experts to use; None for the router's choice.

        Also returns the number of rows of MoE layers in which the router's choice differs from
        `routes`.
        """
        x = self.weights["model.embed_tokens.weight"][tokens]
        num_different = 0
        moe_layer = 0
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            norm_output = self._norm(x, f"{prefix}input_layernorm")
            x = x + self._attention(f"{prefix}self_attn.", norm_output)
            norm_output = self._norm(x, f"{prefix}post_attention_layernorm")
            mlp_prefix = _mlp_prefix(self.config, layer)
            if layer in self.config["mlp_only_layers"]:
                x = x + self._mlp(mlp_prefix, norm_output)
            else:
                layer_routes = None if routes is None else routes[:, moe_layer]
                output, layer_different = self._experts(mlp_prefix, norm_output, layer_routes)
                x = x + output
                num_different += layer_different
                moe_layer += 1
        head = "lm_head.weight"
        if self.config["tie_word_embeddings"]:
            head = "model.embed_tokens.weight"
        return self._norm(x, "model.norm") @ self.weights[head].T, num_different

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        size = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / size * self.weights[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate_name, up, down = _mlp_names(self.config)
        gate = self._linear(x, prefix + gate_name)
        product = gate * torch.sigmoid(gate) * self._linear(x, prefix + up)
        return self._linear(product, prefix + down)

    def _experts(
        self, prefix: str, x: torch.Tensor, routes: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """Return the output, and the number of rows in which the router's choice differs."""
        probabilities = self._linear(x, prefix + "gate").softmax(-1)
        live_routes = probabilities.topk(self.config["num_experts_per_tok"], dim=-1).indices
        routes = live_routes if routes is None else routes
        shares = probabilities.gather(-1, routes)
        if self.config["norm_topk_prob"]:
            shares = shares / shares.sum(-1, keepdim=True)
        output = torch.zeros_like(x)
        for expert in range(self.config["num_experts"]):
            rows, place = (routes == expert).nonzero(as_tuple=True)
            expert_output = self._mlp(f"{prefix}experts.{expert}.", x[rows])
            output = output.index_add(0, rows, shares[rows, place, None] * expert_output)
        is_different = (live_routes.sort(-1).values != routes.sort(-1).values).any(-1)
        return output, int(is_different.sum())

    def _attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        head_dim = self.config["head_dim"]
        q, k, v = (
            self._linear(x, f"{prefix}{name}_proj").view(n, -1, head_dim).transpose(0, 1)
            for name in "qkv"
        )
        if self.config["model_type"] != "mixtral":
            q = self._norm(q, prefix + "q_norm")
            k = self._norm(k, prefix + "k_norm")
        q = self._rotate(q)
        k = self._rotate(k)
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        v = v.repeat_interleave(len(q) // len(v), dim=0)
        is_future = torch.ones(n, n).triu(1).bool()
        scores = (q @ k.transpose(1, 2) / head_dim**0.5).masked_fill(is_future, -torch.inf)
        output = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
        return self._linear(output, prefix + "o_proj")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the rotary embedding to [heads, n, dim]: dimension i turns with i + dim / 2."""
        half = x.shape[-1] // 2
        speed = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed
        first = x[..., :half]
        second = x[..., half:]
        return torch.cat(
            [
                first * angle.cos() - second * angle.sin(),
                second * angle.cos() + first * angle.sin(),
            ],
            dim=-1,
        )
