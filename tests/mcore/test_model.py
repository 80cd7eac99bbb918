from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore.test_hf_weights import build


def test_settings_of_a_model_from_scratch_take_effect(megatron: Any, checkpoint: Path) -> None:
    (model,), _ = build(checkpoint, load=False, embedding_std=0.5, hidden_dropout=0.25)
    assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert model.decoder.layers[0].mlp.router.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert model.config.hidden_dropout == 0.25


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_have_the_dtype_of_the_settings(megatron: Any, checkpoint: Path, dtype: str) -> None:
    (model,), _ = build(checkpoint, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_a_gpu_adds_up_experts_in_a_fixed_order_and_fuses_what_replay_allows(
    megatron: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron itself accepts these settings, with the kernels that Transformer Engine brings."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    from megatron_rl.config.schema import ModelSettings, ParallelSettings
    from megatron_rl.mcore.transformer_config import transformer_config
    from megatron_rl.models.families import read_shape

    kernels = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
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
        "moe_permute_fusion", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"
    }  # fmt: skip
    assert fusions("local") == set(), "tests/mcore/test_ordered_experts.py holds its order"
