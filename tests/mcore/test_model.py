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
