from __future__ import annotations

import subprocess
import sys
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
def test_parameters_have_the_dtype_of_the_settings(
    megatron: Any, checkpoint: Path, dtype: str
) -> None:
    (model,), _ = build(checkpoint, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_a_rank_on_a_cpu_loads_no_compiler_for_what_it_does_not_compile() -> None:
    """Two to three seconds in every rank of every job; the C++ compiler that it would call may be
    missing.
    """
    code = (
        "import sys, torch\n"
        "from megatron_rl.mcore import compat\n"
        "compat.install()\n"
        "from megatron.core.transformer.moe.router import TopKRouter\n"
        "from megatron_rl.mcore.layers.varlen_attention import VarlenAttention\n"
        "assert not VarlenAttention().supports(*[torch.ones(4, 2, 8)] * 3)\n"
        "assert torch.compile.__module__ == 'torch', 'for those who call it themselves'\n"
        "assert not hasattr(TopKRouter._apply_expert_bias, '_torchdynamo_orig_callable')\n"
        "print([name for name in ('torch._inductor.compile_fx', 'torch._dynamo') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_gpu_adds_up_experts_in_a_fixed_order_and_fuses_what_replay_allows(
    megatron: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron itself accepts these settings, with the kernels that Transformer Engine brings."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    from megatron_rl.config.schema import ModelSettings, ParallelSettings
    from megatron_rl.mcore.transformer_config import transformer_config
    from megatron_rl.models.families import read_shape

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
    assert fusions("local") == set(), "tests/mcore/test_deterministic_permute.py holds its order"
