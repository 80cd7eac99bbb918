"""SGLang's model classes at the widths of published models take what Megatron's models send.

Only the first layers are built: all others have the same widths.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from tests.lab.engine_rehearsal.findings import summarize
from tests.lab.engine_rehearsal.rehearsal import GPUS, Weights, Workload, rehearse
from tests.support.configurations import configuration_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

PUBLISHED = Path(__file__).parents[2] / "support" / "published"
# SGLang fuses these two in the loader, and sync is refused for them (models/limits.py).
LATENT = "fused_qkv_a_proj_with_mqa.weight"


def configuration(model_path: Path, tp: int, ep: int) -> Configuration:
    """A run with this model. The rules of the tiny model apply, and all hold."""
    overrides = ["experiment=smoke", "model=column_addition", "model.dtype=bfloat16"]
    c = configuration_of(overrides, facts=LaunchFacts(num_gpus=8))
    return replace(
        c,
        model=replace(c.model, path=str(model_path)),
        engine=replace(c.engine, tp=tp, ep=ep),
    )


@pytest.mark.parametrize(
    ("name", "layers", "tp", "ep", "weights"),
    [
        ("qwen3_30b_a3b", 2, 1, 1, "bfloat16"),
        ("qwen3_30b_a3b", 2, 4, 4, "bfloat16"),
        ("qwen3_30b_a3b", 2, 4, 1, "bfloat16"),
        ("qwen3_30b_a3b", 2, 4, 4, "fp8_blockwise"),
        ("qwen3_235b_a22b", 2, 8, 8, "bfloat16"),
        ("qwen3_235b_a22b", 2, 8, 8, "fp8_blockwise"),
        ("mixtral_8x7b", 2, 2, 1, "bfloat16"),
        ("mixtral_8x7b", 2, 8, 8, "fp8_blockwise"),
        ("deepseek_v3", 4, 8, 8, "bfloat16"),
        ("deepseek_v3", 4, 8, 8, "fp8_blockwise"),
    ],
)
def test_every_rank_keeps_every_tensor(
    name: str, layers: int, tp: int, ep: int, weights: Weights
) -> None:
    workload = Workload(GPUS["h100"], layers, weights)
    rehearsal = rehearse(configuration(PUBLISHED / name, tp, ep), workload)
    print(name, tp, ep, weights, len(rehearsal.tensors), rehearsal.parameter_bytes)
    lines = summarize(rehearsal.findings)
    if name == "deepseek_v3":
        assert lines and all(LATENT in line for line in lines)
    else:
        assert lines == []
    assert [load.rank for load in rehearsal.reply.ranks] == list(range(tp))


def test_a_dense_model_of_full_width_is_kept(tmp_path: Path) -> None:
    """The shape of Qwen3-8B, with two layers."""
    config = json.loads((PUBLISHED / "qwen3_30b_a3b" / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096}
    config |= {"intermediate_size": 12288, "num_key_value_heads": 8, "num_hidden_layers": 2}
    for key in [key for key in config if "expert" in key or "moe" in key or "mlp" in key]:
        del config[key]
    for key in ("decoder_sparse_step", "norm_topk_prob"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    c = configuration(tmp_path, 4, 1)
    c = replace(c, train=replace(c.train, replay="off"))
    rehearsal = rehearse(c, Workload(GPUS["h200"]))
    assert summarize(rehearsal.findings) == []


def test_blocks_that_shards_would_cut_are_named() -> None:
    """768 columns of an expert are six blocks of 128, which four ranks cannot share."""
    workload = Workload(GPUS["h100"], 2, "fp8_blockwise")
    rehearsal = rehearse(configuration(PUBLISHED / "qwen3_30b_a3b", 4, 1), workload)
    assert any("128" in line for line in summarize(rehearsal.findings))
