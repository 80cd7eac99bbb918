"""A tiny random Qwen3-MoE checkpoint in Hugging Face format, which the tests here serve."""

from __future__ import annotations

from pathlib import Path

LAYERS = 4
EXPERTS = 8
TOP_K = 2
VOCAB = 200


def write_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Write random float32 weights (about 2.5 MB).

    Their spread is wide enough that logits and routers are not degenerate.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
    model.config.dtype = torch.float32
    model.save_pretrained(directory)
    return directory
