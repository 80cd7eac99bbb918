"""Bytes of a rank and of an engine, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration, ParallelSettings
from megatron_rl.models.parameter_count import num_parameters
from megatron_rl.models.shape import LatentAttention, ModelShape
from megatron_rl.planning.memory import Held, engine_memory, held_parameters, rank_memory

SMALL = ModelShape(
    architecture="Qwen3MoeForCausalLM",
    num_layers=4,
    hidden_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    qk_norm=True,
    ffn_hidden_size=32,
    vocab_size=10,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    initializer_range=0.02,
    tie_word_embeddings=False,
    max_position_embeddings=64,
    eos_token_ids=(1,),
    moe_layers=(0, 2, 3),
    num_experts=4,
    topk=2,
    moe_ffn_hidden_size=16,
)
# hidden x head x 2 (heads + groups) = 8 * 4 * 12; 2 x 4 of q and k norms, 8 of the input's
ATTENTION, NORMS = 384, 16
ROUTER = 4 * 8 + 8  # and the norm before it
EXPERT = 3 * 8 * 16
DENSE = 3 * 8 * 32


def settings(**parallel: int | bool) -> Configuration:
    c = compose(["experiment=smoke"])
    return replace(
        c,
        parallel=ParallelSettings(**parallel),
        train=replace(c.train, tokens_per_micro_batch=100),
        rollout=replace(c.rollout, prompts_per_step=4, samples_per_prompt=2, max_new_tokens=12),
        data=replace(c.data, max_prompt_tokens=8),
    )


def test_one_rank_holds_everything() -> None:
    dense = 4 * (ATTENTION + NORMS) + 3 * ROUTER + DENSE + 8 + 2 * 80 + 8
    assert held_parameters(SMALL, ParallelSettings(), 0) == Held(dense, 3 * 4 * EXPERT)
    assert num_parameters(SMALL) == dense + 12 * EXPERT


def test_stages_hold_their_layers_and_the_tables_at_the_ends() -> None:
    pp2 = ParallelSettings(pp=2)
    layers = 2 * (ATTENTION + NORMS)
    assert held_parameters(SMALL, pp2, 0) == Held(layers + ROUTER + DENSE + 8 + 80, 4 * EXPERT)
    assert held_parameters(SMALL, pp2, 1) == Held(layers + 2 * ROUTER + 80 + 8, 8 * EXPERT)
    tied = replace(SMALL, tie_word_embeddings=True)  # the last stage has a copy
    assert held_parameters(tied, pp2, 1) == held_parameters(SMALL, pp2, 1)
    assert (
        held_parameters(SMALL, ParallelSettings(), 0).dense
        - held_parameters(tied, ParallelSettings(), 0).dense
        == 80
    )


def test_ranks_share_layers_and_experts() -> None:
    four = ParallelSettings(tp=2, ep=2, sequence_parallel=True)
    dense = (4 * ATTENTION + DENSE) // 2 + 4 * NORMS + 3 * ROUTER + 8 + 2 * 40 + 8
    assert held_parameters(SMALL, four, 0) == Held(dense, 6 * EXPERT)
    assert held_parameters(SMALL, replace(four, etp=2), 0).experts == 3 * EXPERT


def test_the_optimizer_is_shared_by_ranks_with_the_same_weights() -> None:
    memory = rank_memory(settings(ep=2), SMALL, world_size=4, stage=0)
    held = held_parameters(SMALL, ParallelSettings(ep=2), 0)
    assert memory.parameters == memory.gradients == 4 * (held.dense + held.experts)
    assert memory.optimizer == 8 * (
        held.dense // 4 + held.experts // 2
    )  # float32: two moments, no copy
    c = settings(ep=2)
    half = rank_memory(
        replace(c, model=replace(c.model, dtype="bfloat16")), SMALL, world_size=4, stage=0
    )
    assert (half.parameters, half.gradients) == (memory.parameters // 2, memory.gradients)
    assert half.optimizer == memory.optimizer * 3 // 2


def test_a_save_gathers_weights_and_moments_on_every_rank_and_copies_what_it_writes_meanwhile() -> (
    None
):
    c = settings(ep=2)
    held = held_parameters(SMALL, ParallelSettings(ep=2), 0)
    assert rank_memory(c, SMALL, world_size=4, stage=0).host_save == 0
    saving = replace(c, run=replace(c.run, checkpoint_every=1))
    assert rank_memory(saving, SMALL, world_size=4, stage=0).host_save == 12 * (
        held.dense + held.experts
    )
    copying = replace(saving, run=replace(saving.run, background_saves=True))
    own = held.dense // 4 + held.experts // 2
    assert (
        rank_memory(copying, SMALL, world_size=4, stage=0).host_save
        == 12 * (held.dense + held.experts) + 16 * own
    )
    before, after = (rank_memory(each, SMALL, world_size=4, stage=0).total for each in (c, copying))
    assert before == after, "none of it lies on the device"


def test_logits_are_the_last_stages_and_routes_those_of_its_layers() -> None:
    first, last = (
        rank_memory(settings(pp=2), SMALL, world_size=2, stage=stage) for stage in (0, 1)
    )
    assert (first.logits, last.logits) == (0, 3 * 100 * 10 * 4)
    assert (first.routes, last.routes) == (
        8 * 20 * 1 * 2,
        8 * 20 * 2 * 2,
    )  # 8 rollouts of 20 tokens, a byte an expert
    many = rank_memory(settings(pp=2), replace(SMALL, num_experts=300), world_size=2, stage=1)
    assert many.routes == 2 * last.routes
    assert last.host_routes == last.routes


def test_recomputation_keeps_inputs_and_one_layer() -> None:
    c = settings()
    full = rank_memory(
        replace(c, model=replace(c.model, recompute="full")), SMALL, world_size=1, stage=0
    )
    attended = 2 * 8 + 2 * 8 * 4 + 4 * 4
    experts, dense = 2 * 8 + 2 * (2 * 8 + 3 * 16), 2 * 8 + 3 * 32
    assert full.activations == 4 * 100 * (4 * 8 + attended + max(experts, dense))
    none = rank_memory(c, SMALL, world_size=1, stage=0)
    assert none.activations == 4 * 100 * (4 * attended + 3 * experts + dense)


def test_an_engine_keeps_keys_and_values_of_all_its_requests() -> None:
    c = settings()
    c = replace(c, engine=replace(c.engine, max_running_requests=5, tp=2, dtype="float32"))
    memory = engine_memory(c, SMALL)
    assert memory.parameters == 4 * -(-num_parameters(SMALL) // 2)
    assert memory.kv_cache == 5 * 20 * 4 * 2 * 1 * 4 * 4
    few = replace(c, engine=replace(c.engine, max_total_tokens=30))
    assert engine_memory(few, SMALL).kv_cache == 30 * 4 * 2 * 1 * 4 * 4
    latent = replace(SMALL, latent=LatentAttention(None, 6, 2, 2, 4))
    assert engine_memory(c, latent).kv_cache == 5 * 20 * 4 * (6 + 2) * 4


@pytest.mark.parametrize(
    ("name", "count"), [("qwen3_30b_a3b", 30_532_122_624), ("qwen3_235b_a22b", 235_093_634_560)]
)
def test_published_models_have_their_published_size(name: str, count: int) -> None:
    from megatron_rl.models.families import read_shape

    assert (
        num_parameters(read_shape(Path(__file__).parents[1] / "support" / "published" / name))
        == count
    )
