"""Settings and fixtures of all tests: no network, a tiny model, and Megatron's groups."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Set before anything imports torch or transformers: two cores are shared by every process a test
# starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

hypothesis.settings.register_profile("default", max_examples=25, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def hf_model() -> Any:
    """A model with two query groups, one dense layer of four and weights far from initial ones."""
    import torch
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
    from megatron_rl.mcore import compat

    compat.install()
    from megatron_rl.config.schema import ParallelSettings
    from megatron_rl.mcore.parallel import initialize, shutdown

    yield initialize(ParallelSettings(timeout_s=60), seed=1)
    shutdown()
