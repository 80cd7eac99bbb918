"""Models built from settings, and the fusions that a GPU uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import LatentAttention, Yarn
from tests.mcore.test_hf_weights import build


def test_settings_of_random_initialization_take_effect(megatron: Any, checkpoint: Path) -> None:
    from megatron_rl.mcore.model import build_models

    shape = replace(read_shape(checkpoint), embedding_initializer_range=0.5)
    settings = ModelSettings(path=str(checkpoint), init="random", hidden_dropout=0.25)
    (model,) = build_models(shape, settings, ParallelSettings())
    assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert model.decoder.layers[0].mlp.router.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert model.config.hidden_dropout == 0.25


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_have_the_dtype_of_the_settings(
    megatron: Any, checkpoint: Path, dtype: str
) -> None:
    (model,), _ = build(checkpoint, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_gpu_uses_the_fusions_that_replay_allows(
    megatron: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron accepts these settings if it finds the kernels of Transformer Engine."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    from megatron_rl.mcore.transformer_config import transformer_config

    kernels = (
        "permute",
        "permute_with_probs",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
        "unpermute",
    )
    for name in kernels:
        monkeypatch.setattr(moe_utils, f"fused_{name}", object(), raising=False)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shape = read_shape(checkpoint)

    def fusions(spec: Any) -> set[str]:
        settings = ModelSettings(path=str(checkpoint), dtype="bfloat16", spec=spec)
        config = transformer_config(shape, settings, ParallelSettings(), on_gpu=True)
        return {name for name in vars(config) if name.endswith("_fusion") and getattr(config, name)}

    assert fusions("te") == {
        "moe_permute_fusion",
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
    }
    assert fusions("local") == set(), (
        "tests/mcore/test_deterministic_permute.py tests its order of additions"
    )


@pytest.mark.parametrize(
    ("plain_dim", "rotary_dim", "value_dim", "is_fused"),
    [(128, 64, 128, True), (12, 8, 10, False), (128, 64, 192, False), (128, 48, 128, False)],
)
def test_latent_rotary_embedding_is_fused_for_powers_of_two_alone(
    plain_dim: int, rotary_dim: int, value_dim: int, is_fused: bool
) -> None:
    """The ranges of Megatron's Triton kernels must be powers of two."""
    from megatron_rl.mcore.transformer_config import fuses_rotary_embedding

    yarn = Yarn(4.0, 4096, 32.0, 1.0, 1.0, 1.0)
    latent = LatentAttention(None, 16, plain_dim, rotary_dim, value_dim, yarn)
    assert fuses_rotary_embedding(latent) is is_fused
    assert not fuses_rotary_embedding(replace(latent, yarn=None))
    assert fuses_rotary_embedding(None)
