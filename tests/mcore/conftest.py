"""Fixtures: a tiny Qwen3-MoE checkpoint of transformers, and Megatron's groups in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore import compat


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        skip = pytest.mark.skip(reason="these tests pin down the CPU path")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def hf_model() -> Any:
    """A model with two query groups, one dense layer of four and weights far from initial ones."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        rope_theta=10000.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=256,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        eos_token_id=1,
    )
    generator = torch.Generator().manual_seed(3)
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


@pytest.fixture(scope="session")
def checkpoint(hf_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    hf_model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def megatron() -> Iterator[Any]:
    """Create Megatron's groups for this one process; yields its `RankLayout`."""
    compat.install()
    from megatron_rl.mcore.parallel import initialize, shutdown

    yield initialize(ParallelSettings(timeout_s=60), seed=1)
    shutdown()
