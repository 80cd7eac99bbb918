"""Refusals of settings by model family."""

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.launch_facts import LaunchFacts
from tests.support.configurations import BF16, NODE, MakeCheckpoint, accept, refusals

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_experts": None,
    "num_experts_per_tok": None,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "num_experts": None,
    "num_local_experts": 8,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
TWO = LaunchFacts(world_size=2, local_world_size=2)


def keys(checkpoint: Any, *overrides: str, facts: LaunchFacts | None = None) -> dict[str, str]:
    """Refusals by key."""
    return {refusal.key: str(refusal) for refusal in refusals(checkpoint, *overrides, facts=facts)}


def test_a_model_without_experts_has_no_routes_to_replay(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = make_checkpoint(**DENSE)
    messages = keys(checkpoint)
    assert list(messages) == ["train.replay"]
    assert "no experts" in messages["train.replay"]
    assert accept(checkpoint, "train.replay=off").train.replay == "off"
    assert list(keys(checkpoint, "train.replay=off", "parallel.ep=2", facts=TWO)) == ["parallel.ep"]


def test_mixtral_is_trained_in_every_layout(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = make_checkpoint(**MIXTRAL)
    accept(checkpoint, "parallel=tp2_ep2", facts=TWO)
    accept(checkpoint, "parallel=cp2", facts=TWO)


@pytest.fixture
def train_only(tmp_path: Path) -> list[str]:
    """Overrides of training on recorded rollouts, without engines."""
    return ["mode=train_only", f"rollout.recording={tmp_path}"]


@pytest.mark.parametrize(
    ("layout", "key"),
    [("tp2_ep2", "parallel.tp"), ("tp2_pp2", "parallel.tp"), ("cp2", "parallel.cp")],
)
def test_latent_attention_is_not_split_over_ranks(
    make_checkpoint: MakeCheckpoint, train_only: list[str], layout: str, key: str
) -> None:
    four = LaunchFacts(world_size=4, local_world_size=4, num_gpus=8)
    overrides = (f"parallel={layout}", BF16, *train_only)
    messages = keys(make_checkpoint(**DEEPSEEK), *overrides, facts=four)
    assert list(messages) == [key]
    assert "latent attention" in messages[key]


@pytest.mark.parametrize("layout", ["ep2", "pp2"])
def test_latent_attention_in_experts_and_stages(
    make_checkpoint: MakeCheckpoint, train_only: list[str], layout: str
) -> None:
    gpus = LaunchFacts(world_size=2, local_world_size=2, num_gpus=4)
    overrides = (f"parallel={layout}", BF16, *train_only)
    accept(make_checkpoint(**DEEPSEEK), *overrides, facts=gpus)


@pytest.mark.parametrize("mode", ["train", "eval", "profile"])
@pytest.mark.parametrize("facts", [None, NODE])
def test_engines_serve_no_latent_attention(
    make_checkpoint: MakeCheckpoint, mode: str, facts: LaunchFacts | None
) -> None:
    messages = keys(make_checkpoint(**DEEPSEEK), BF16, f"mode={mode}", facts=facts)
    assert "DeepseekV3ForCausalLM" in messages["model.path"]
    assert "mode=train_only" in messages["model.path"]


@pytest.mark.parametrize("family", [{}, MIXTRAL])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_tied_embeddings_of_experts_are_refused_with_engines(
    make_checkpoint: MakeCheckpoint, train_only: list[str], family: dict[str, Any], mode: str
) -> None:
    checkpoint = make_checkpoint(tie_word_embeddings=True, **family)
    messages = keys(checkpoint, f"mode={mode}")
    assert list(messages) == ["model.path"]
    assert "tie_word_embeddings=true" in messages["model.path"]
    accept(checkpoint, *train_only)


def test_tied_embeddings_without_experts_are_accepted(make_checkpoint: MakeCheckpoint) -> None:
    accept(make_checkpoint(tie_word_embeddings=True, **DENSE), "train.replay=off")


def test_widths_that_engines_on_cpus_would_pad_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = make_checkpoint(moe_intermediate_size=24)
    assert "multiples of 32" in keys(checkpoint)["model.path"]
    accept(checkpoint, BF16, facts=NODE)


def test_engines_on_cpus_that_split_mlps_too_far_are_refused_by_their_size(
    make_checkpoint: MakeCheckpoint,
) -> None:
    checkpoint = make_checkpoint(moe_intermediate_size=64)
    messages = keys(checkpoint, "engine.tp=4")
    assert list(messages) == ["engine.tp"] and "multiples of 128" in messages["engine.tp"]


SELECTIVE = "model.recompute=selective"
TE = LaunchFacts(world_size=1, local_world_size=1, num_gpus=2, transformer_engine=True)
HERE = LaunchFacts(world_size=1, local_world_size=1)


@pytest.mark.parametrize(
    ("family", "overrides", "facts", "fragment"),
    [
        ({}, ["model.recompute_modules=[moe]"], HERE, "model.recompute=none recomputes nothing"),
        (
            {},
            ["model.recompute=full", "model.recompute_modules=[moe]"],
            HERE,
            "model.recompute=full recomputes everything",
        ),
        ({}, [SELECTIVE, "model.recompute_modules=[]"], HERE, "An empty list"),
        ({}, [SELECTIVE, "model.recompute_modules=[moe_act]"], HERE, "model.spec is local"),
        (
            {},
            [SELECTIVE, "model.recompute_modules=[moe_act]", BF16, "model.spec=local"],
            TE,
            "model.spec is local",
        ),
        (
            {},
            [SELECTIVE, "model.recompute_modules=[layernorm]"],
            HERE,
            "not installed",
        ),
        (
            {},
            [SELECTIVE, "model.recompute_modules=[mlp]"],
            HERE,
            "experts in every layer",
        ),
        (
            {},
            [SELECTIVE, "model.recompute_modules=[shared_experts]"],
            HERE,
            "no shared experts",
        ),
        (
            {},
            [SELECTIVE, "model.recompute_modules=[mla_up_proj]", BF16],
            TE,
            "no latent attention",
        ),
        (
            DENSE,
            ["train.replay=off", SELECTIVE, "model.recompute_modules=[moe]"],
            HERE,
            "no experts",
        ),
    ],
)
def test_modules_that_cannot_be_recomputed_are_refused(
    make_checkpoint: MakeCheckpoint,
    family: dict[str, Any],
    overrides: list[str],
    facts: LaunchFacts,
    fragment: str,
) -> None:
    messages = keys(make_checkpoint(**family), *overrides, facts=facts)
    assert list(messages) == ["model.recompute_modules"]
    assert fragment in messages["model.recompute_modules"]


def test_modules_that_can_be_recomputed_are_accepted(
    make_checkpoint: MakeCheckpoint, train_only: list[str]
) -> None:
    modules = "model.recompute_modules=[moe,core_attn]"
    assert accept(make_checkpoint(), SELECTIVE, modules).model.recompute_modules == [
        "moe",
        "core_attn",
    ]
    modules = "model.recompute_modules=[moe_act,layernorm]"
    accept(make_checkpoint(), SELECTIVE, modules, BF16, facts=TE)
    modules = "model.recompute_modules=[mla_up_proj,mlp,shared_experts]"
    checkpoint = make_checkpoint(**DEEPSEEK, n_shared_experts=1)
    accept(checkpoint, SELECTIVE, modules, BF16, *train_only, facts=TE)
