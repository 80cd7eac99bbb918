"""Qwen3-MoE, dense Qwen3 and Mixtral in float64 and plain torch: a sequence at a time, experts
forced.

It shares no code with the trainer's model, its losses or its training: whole steps are compared
with it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# A dense layer among those with experts, an odd vocabulary, four key-value heads: every layout pads
# or cuts something.
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
# What differs in the other families.
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
    """A checkpoint of `CONFIG`, some keys changed, with random float32 weights that all matter."""
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
    hidden, dim, vocabulary = config["hidden_size"], config["head_dim"], config["vocab_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    mixtral, (gate, up, down) = config["model_type"] == "mixtral", _mlp_names(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at, dense = f"model.layers.{layer}.", layer in config["mlp_only_layers"]
        shapes |= {
            f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
        shapes |= {f"{at}self_attn.{x}_norm.weight": (dim,) for x in ("" if mixtral else "qk")}
        shapes[f"{at}self_attn.q_proj.weight"] = (heads * dim, hidden)
        shapes |= {f"{at}self_attn.{x}_proj.weight": (groups * dim, hidden) for x in "kv"}
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * dim)
        at += "block_sparse_moe." if mixtral else "mlp."
        if not dense:
            shapes[f"{at}gate.weight"] = (config["num_experts"], hidden)
        wide = config["intermediate_size" if dense or mixtral else "moe_intermediate_size"]
        for expert in [""] if dense else [f"experts.{e}." for e in range(config["num_experts"])]:
            shapes |= {f"{at}{expert}{x}.weight": (wide, hidden) for x in (gate, up)}
            shapes[f"{at}{expert}{down}.weight"] = (hidden, wide)
    shapes["model.norm.weight"] = (hidden,)
    return (
        shapes
        if config["tie_word_embeddings"]
        else shapes | {"lm_head.weight": (vocabulary, hidden)}
    )


def _mlp_names(config: dict[str, Any]) -> tuple[str, str, str]:
    """What gate, up and down are called."""
    return (
        ("w1", "w3", "w2")
        if config["model_type"] == "mixtral"
        else ("gate_proj", "up_proj", "down_proj")
    )


@dataclass(frozen=True)
class Float64Model:
    """weights: float64 leaves under Hugging Face names."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    @classmethod
    def read(cls, checkpoint: Path) -> "Float64Model":
        tensors = load_file(checkpoint / "model.safetensors")
        weights = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
        return cls(json.loads((checkpoint / "config.json").read_text()), weights)

    def logits(self, tokens: torch.Tensor, routes: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """Logits [n, vocabulary] of tokens [n], and in how many rows of MoE layers the live choice
        is not `routes`.

        routes [n, MoE layers, top-k]: the experts to use; None: the live choice.
        """
        x, differing, moe_layer = self.weights["model.embed_tokens.weight"][tokens], 0, 0
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self._attention(at + "self_attn.", self._norm(x, at + "input_layernorm"))
            normed = self._norm(x, at + "post_attention_layernorm")
            at += "block_sparse_moe." if self.config["model_type"] == "mixtral" else "mlp."
            if layer in self.config["mlp_only_layers"]:
                x = x + self._mlp(at, normed)
            else:
                out, changed = self._experts(
                    at, normed, None if routes is None else routes[:, moe_layer]
                )
                x, differing, moe_layer = x + out, differing + changed, moe_layer + 1
        head = (
            "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        )
        return self._norm(x, "model.norm") @ self.weights[head].T, differing

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        size = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / size * self.weights[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        gate_name, up, down = _mlp_names(self.config)
        gate = self._linear(x, at + gate_name)
        return self._linear(gate * torch.sigmoid(gate) * self._linear(x, at + up), at + down)

    def _experts(
        self, at: str, x: torch.Tensor, forced: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        probabilities = self._linear(x, at + "gate").softmax(-1)
        live = probabilities.topk(self.config["num_experts_per_tok"], dim=-1).indices
        chosen = live if forced is None else forced
        share = probabilities.gather(-1, chosen)
        if self.config["norm_topk_prob"]:
            share = share / share.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(self.config["num_experts"]):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(
                0, rows, share[rows, place, None] * self._mlp(f"{at}experts.{expert}.", x[rows])
            )
        return out, int((live.sort(-1).values != chosen.sort(-1).values).any(-1).sum())

    def _attention(self, at: str, x: torch.Tensor) -> torch.Tensor:
        n, dim = len(x), self.config["head_dim"]
        q, k, v = (
            self._linear(x, f"{at}{name}_proj").view(n, -1, dim).transpose(0, 1) for name in "qkv"
        )
        if self.config["model_type"] != "mixtral":
            q, k = self._norm(q, at + "q_norm"), self._norm(k, at + "k_norm")
        q, k = self._rotated(q), self._rotated(k)
        k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(
            torch.ones(n, n).triu(1).bool(), -torch.inf
        )
        return self._linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1), at + "o_proj")

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of [heads, n, dim]: dimension i turns with i + dim / 2."""
        half = x.shape[-1] // 2
        speed = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
        )
