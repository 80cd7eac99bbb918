"""Memory of a rank and of an engine, by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.algorithms import KlSettings
from megatron_rl.config.schema import Configuration, ParallelSettings
from megatron_rl.config.values import Dtype
from megatron_rl.models.parameter_count import num_parameters
from megatron_rl.models.shape import LatentAttention, ModelShape
from megatron_rl.planning.memory import (
    RankMemory,
    RankParameters,
    engine_memory,
    rank_memory,
    rank_parameters,
)
from tests.support.configurations import configuration_of

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
ATTENTION = 384  # hidden x head x 2 (heads + groups) = 8 * 4 * 12
NORMS = 16  # 2 x 4 of queries and keys, 8 of the input
ROUTER = 4 * 8 + 8  # with the norm before it
EXPERT = 3 * 8 * 16
DENSE = 3 * 8 * 32


def make_settings(**parallel: int | bool) -> Configuration:
    c = configuration_of(["experiment=smoke"])
    return replace(
        c,
        parallel=ParallelSettings(**parallel),
        train=replace(c.train, tokens_per_micro_batch=100),
        rollout=replace(c.rollout, prompts_per_step=4, samples_per_prompt=2, max_new_tokens=12),
        data=replace(c.data, max_prompt_tokens=8),
    )


def memory_of(c: Configuration, *, world_size: int = 4, stage: int = 0) -> RankMemory:
    return rank_memory(c, SMALL, world_size=world_size, stage=stage)


def test_one_rank_has_all_parameters() -> None:
    dense = 4 * (ATTENTION + NORMS) + 3 * ROUTER + DENSE + 8 + 2 * 80 + 8
    parameters = rank_parameters(SMALL, ParallelSettings(), 0)
    assert parameters == RankParameters(dense, 3 * 4 * EXPERT)
    assert num_parameters(SMALL) == parameters.total == dense + 12 * EXPERT


def test_stages_have_their_layers_and_the_end_stages_a_table() -> None:
    pp2 = ParallelSettings(pp=2)
    layers = 2 * (ATTENTION + NORMS)
    first = RankParameters(layers + ROUTER + DENSE + 8 + 80, 4 * EXPERT)
    last = RankParameters(layers + 2 * ROUTER + 80 + 8, 8 * EXPERT)
    assert rank_parameters(SMALL, pp2, 0) == first
    assert rank_parameters(SMALL, pp2, 1) == last


def test_tied_embeddings_save_a_table_only_on_a_single_stage() -> None:
    one_stage = ParallelSettings()
    pp2 = ParallelSettings(pp=2)
    tied_shape = replace(SMALL, tie_word_embeddings=True)
    assert rank_parameters(tied_shape, pp2, 1) == rank_parameters(SMALL, pp2, 1)
    untied_dense = rank_parameters(SMALL, one_stage, 0).dense
    assert untied_dense - rank_parameters(tied_shape, one_stage, 0).dense == 80


def test_tensor_and_expert_parallelism_split_parameters() -> None:
    four = ParallelSettings(tp=2, ep=2)
    dense = (4 * ATTENTION + DENSE) // 2 + 4 * NORMS + 3 * ROUTER + 8 + 2 * 40 + 8
    assert rank_parameters(SMALL, four, 0) == RankParameters(dense, 6 * EXPERT)
    assert rank_parameters(SMALL, replace(four, etp=2), 0).experts == 3 * EXPERT


def test_ranks_with_equal_weights_share_the_optimizer() -> None:
    c = make_settings(ep=2)
    memory = memory_of(c)
    parameters = rank_parameters(SMALL, ParallelSettings(ep=2), 0)
    share = parameters.dense // 4 + parameters.experts // 2
    assert memory.parameters == memory.gradients == 4 * parameters.total
    assert memory.optimizer == 8 * share, "two moments, no copy of float32 weights"
    bfloat16 = memory_of(replace(c, model=replace(c.model, dtype="bfloat16")))
    assert bfloat16.parameters == memory.parameters // 2
    assert bfloat16.gradients == memory.gradients
    assert bfloat16.optimizer == memory.optimizer * 3 // 2


def test_a_save_gathers_weights_and_moments_in_host_memory() -> None:
    c = make_settings(ep=2)
    parameters = rank_parameters(SMALL, ParallelSettings(ep=2), 0)
    assert (memory_of(c).host_save, memory_of(c).save) == (0, 0)
    with_checkpoints = replace(c, run=replace(c.run, checkpoint_every=1))
    assert memory_of(with_checkpoints).host_save == 20 * parameters.total


def test_a_resume_takes_host_memory_without_saves() -> None:
    c = make_settings(ep=2)
    parameters = rank_parameters(SMALL, ParallelSettings(ep=2), 0)
    resuming = replace(c, run=replace(c.run, resume="auto"))
    assert memory_of(resuming).host_save == 12 * parameters.total
    assert memory_of(resuming).save == 0


def test_a_background_save_also_copies_the_share_that_a_rank_writes() -> None:
    c = make_settings(ep=2)
    parameters = rank_parameters(SMALL, ParallelSettings(ep=2), 0)
    saving = replace(c, run=replace(c.run, checkpoint_every=1))
    in_background = replace(saving, run=replace(saving.run, background_saves=True))
    share = parameters.dense // 4 + parameters.experts // 2
    assert memory_of(in_background).host_save == 20 * parameters.total + 16 * share
    assert memory_of(in_background).total == memory_of(saving).total, "nothing more on the device"


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_reference_takes_host_memory_for_a_rank_s_weights(dtype: Dtype, size: int) -> None:
    c = make_settings(ep=2)
    c = replace(c, model=replace(c.model, dtype=dtype))
    parameters = rank_parameters(SMALL, ParallelSettings(ep=2), 0)
    with_penalty = replace(c, algo=replace(c.algo, kl=KlSettings(coef=0.1)))
    assert memory_of(c).host_reference == 0
    assert memory_of(with_penalty).host_reference == size * parameters.total
    assert memory_of(with_penalty).total == memory_of(c).total, "nothing more on the device"


def test_a_save_gathers_the_largest_buffer_on_the_device() -> None:
    """Activations and logits are freed before."""
    c = make_settings(ep=2)
    wide = replace(SMALL, moe_ffn_hidden_size=4096)
    saving = replace(c, run=replace(c.run, checkpoint_every=1))
    saving = replace(saving, train=replace(saving.train, tokens_per_micro_batch=1))
    short = replace(
        saving,
        rollout=replace(saving.rollout, max_new_tokens=1),
        data=replace(saving.data, max_prompt_tokens=1),
    )
    memory = rank_memory(short, wide, world_size=4, stage=0)
    experts = rank_parameters(wide, ParallelSettings(ep=2), 0).experts
    assert memory.save == 4 * experts + 4 * experts // 2 - memory.activations - memory.logits > 0


def test_last_stage_has_the_logits() -> None:
    """Two copies and the norm before them, less the peak of a layer that comes later."""
    c = make_settings(pp=2)
    shape = replace(SMALL, vocab_size=1000)
    assert rank_memory(c, shape, world_size=2, stage=0).logits == 0
    logits = 2 * 1000 * 4 + 8 * (4 + 4 + 4)
    last = rank_memory(c, shape, world_size=2, stage=1)
    assert last.logits == 100 * (logits - passing_bytes())
    assert memory_of(c, world_size=2, stage=1).logits == 0, "a small vocabulary takes less"


def test_a_rollout_beyond_the_budget_needs_the_memory_of_its_own_micro_batch() -> None:
    c = make_settings()
    # 8 tokens of the prompt and 12 of the response. The last one is no input.
    small_budget = replace(c, train=replace(c.train, tokens_per_micro_batch=10))
    fitting_budget = replace(c, train=replace(c.train, tokens_per_micro_batch=19))
    assert memory_of(small_budget) == memory_of(fitting_budget)
    expert_layer, dense_layer = layer_bytes()
    rows = 3 * expert_layer + dense_layer + passing_bytes()
    assert memory_of(small_budget).activations == 19 * rows


def test_stages_have_the_routes_of_their_layers() -> None:
    c = make_settings(pp=2)
    # 8 rollouts of 20 tokens, one byte for each of two experts
    assert memory_of(c, world_size=2, stage=0).routes == 8 * 20 * 1 * 2
    last = memory_of(c, world_size=2, stage=1)
    assert last.routes == last.host_routes == 8 * 20 * 2 * 2
    many_experts = rank_memory(c, replace(SMALL, num_experts=300), world_size=2, stage=1)
    assert many_experts.routes == 2 * last.routes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_recomputation_saves_inputs_and_one_layer(dtype: Dtype) -> None:
    c = make_settings()
    c = replace(c, model=replace(c.model, dtype=dtype))
    expert_layer, dense_layer = layer_bytes(dtype)
    passing = passing_bytes(dtype)
    size = 4 if dtype == "float32" else 2
    full = memory_of(replace(c, model=replace(c.model, recompute="full")), world_size=1)
    # A float32 layer keeps its input, which is one of the stage's.
    kept_once = 4 * 8 if dtype == "float32" else 0
    assert full.activations == 100 * (size * 5 * 8 + expert_layer - kept_once + passing)
    without = memory_of(c, world_size=1)
    assert without.activations == 100 * (3 * expert_layer + dense_layer + passing)


# Bytes of each row by hand. Norms: inputs and normalized values in float32, which are copies of
# bfloat16 ones, and their results. Attention in bfloat16: queries and keys after rotation, values
# and outputs. In float32: the projection, a copy of its queries, four padded tensors of all heads,
# and outputs in packed order.
ROUTER_BYTES = 2 * 4 * 4
SAVED = {
    "float32": 2 * 8 * (4 + 4 + 4) + 4 * (16 + 8) + 4 * 16 + 4 * (16 + 2 * 8 + 5 * 16),
    "bfloat16": 2 * 8 * (8 + 2) + 8 * (16 + 8) + 2 * (2 * 16 + 2 * 8),
}


def layer_bytes(dtype: str = "float32", tp: int = 1) -> tuple[float, float]:
    """Bytes that one row saves in a layer with experts and in a dense one.

    Without expert parallelism tensor parallelism also splits the experts: each of its ranks gets
    the tokens of all.
    """
    size = 4 if dtype == "float32" else 2
    experts = size * 2 * (tp * 8 + 6 * 16) + ROUTER_BYTES
    dense = size * 5 * 32
    rotary = 4 * size * 4  # cosines and sines for queries and for keys
    return (SAVED[dtype] + experts) / tp + rotary, (SAVED[dtype] + dense) / tp + rotary


def passing_bytes(dtype: str = "float32", tp: int = 1, copies: int = 2) -> float:
    """Bytes that one row takes in the backward pass of a layer with experts.

    copies: of each routed row.
    """
    size = 4 if dtype == "float32" else 2
    return size * (4 * 8 + copies * 2 * 8) / tp


def test_tensor_parallelism_splits_all_activations() -> None:
    c = make_settings(tp=2)
    expert_layer, dense_layer = layer_bytes(tp=2)
    without = memory_of(c, world_size=2)
    passing = passing_bytes(tp=2)
    assert without.activations == 100 * (3 * expert_layer + dense_layer + passing)
    full = memory_of(replace(c, model=replace(c.model, recompute="full")), world_size=2)
    assert full.activations == 100 * (4 * 4 * 8 / 2 + expert_layer + passing)


def test_shared_experts_save_their_inner_values() -> None:
    with_shared_expert = replace(SMALL, shared_ffn_hidden_size=24)
    for tp in (1, 2):
        c = make_settings(tp=tp)
        difference = (
            rank_memory(c, with_shared_expert, world_size=tp, stage=0).activations
            - memory_of(c, world_size=tp).activations
        )
        assert difference == 4 * 3 * 100 * 5 * 24 / tp


@pytest.mark.parametrize(("q_rank", "width"), [(None, 2 * 6), (5, 5 + 2 * 6)])
def test_latent_attention_saves_its_small_vectors(q_rank: int | None, width: int) -> None:
    c = make_settings()
    latent = replace(SMALL, latent=LatentAttention(q_rank, 6, 2, 2, 4))
    difference = (
        rank_memory(c, latent, world_size=1, stage=0).activations
        - memory_of(c, world_size=1).activations
    )
    rotary = 4 * (2 - 4)  # 2 of its dimensions turn, of the others' heads all 4
    assert difference == 4 * 4 * 100 * (width + rotary)


def test_context_parallelism_splits_rows_and_not_the_routes_of_the_host() -> None:
    shape = replace(SMALL, vocab_size=1000)
    one = rank_memory(make_settings(), shape, world_size=4, stage=0)
    two = rank_memory(make_settings(cp=2), shape, world_size=4, stage=0)
    assert two.activations == one.activations / 2
    assert two.logits == one.logits / 2 > 0
    assert two.host_routes == 2 * one.host_routes, "half as many ranks share the rollouts"
    assert two.routes == one.routes


@pytest.mark.parametrize(
    ("replay", "on_device", "on_host"),
    [("rollout", True, True), ("trainer", True, False), ("off", False, False)],
)
def test_only_recorded_routes_of_engines_are_on_the_host(
    replay: str, on_device: bool, on_host: bool
) -> None:
    c = make_settings()
    memory = memory_of(replace(c, train=replace(c.train, replay=replay)))
    assert (memory.routes > 0, memory.host_routes > 0) == (on_device, on_host)


def test_early_stages_hold_more_micro_batches() -> None:
    """Stage 0 of 3 holds three, the last stage one."""
    shape = replace(SMALL, num_layers=3, moe_layers=(0, 1, 2))
    c = make_settings(pp=3)
    expert_layer, _ = layer_bytes()
    passing = passing_bytes()
    activations = [
        rank_memory(c, shape, world_size=3, stage=stage).activations for stage in range(3)
    ]
    assert activations == [100 * (expert_layer * count + passing) for count in (3, 2, 1)]


def test_interleaved_chunks_hold_more_micro_batches() -> None:
    """Stage s of p with v chunks is (v - 1) p + 2 (p - s - 1) passes ahead, and runs one."""
    shape = replace(SMALL, num_layers=12, moe_layers=tuple(range(12)))
    c = make_settings(pp=3, vpp=2)
    expert_layer, _ = layer_bytes()
    for stage, passes in enumerate((8, 6, 4)):
        memory = rank_memory(c, shape, world_size=3, stage=stage)
        assert memory.activations == 100 * (2 * expert_layer * passes + passing_bytes())


def test_experts_of_other_ranks_need_copies_of_the_rows_that_are_sent() -> None:
    one = memory_of(make_settings())
    two = memory_of(make_settings(ep=2))
    assert two.activations - one.activations == 100 * (
        passing_bytes(copies=4) - passing_bytes(copies=2)
    )


def test_an_export_joins_the_shards_of_the_vocabulary_table() -> None:
    """All shards and the whole table are held, after activations and logits were freed."""
    shape = replace(SMALL, num_layers=6, moe_layers=tuple(range(6)), vocab_size=100_000)
    c = make_settings(tp=2, pp=3)
    first, middle, last = (rank_memory(c, shape, world_size=6, stage=stage) for stage in range(3))
    table = 100_000 * 8 * 4
    assert first.export == 2 * table - first.activations > 0
    assert middle.export == 0
    assert last.export == max(0, 2 * table - last.activations - last.logits)
    whole = rank_memory(make_settings(pp=3), shape, world_size=3, stage=0)
    assert whole.export == 0, "without tensor parallelism nothing is joined"


def test_uneven_stages_have_their_own_layers() -> None:
    parallel = ParallelSettings(pp=2)
    shape = replace(SMALL, num_layers=3, moe_layers=(0, 1, 2))
    assert rank_parameters(shape, parallel, 0).experts == 2 * 4 * EXPERT
    assert rank_parameters(shape, parallel, 1).experts == 1 * 4 * EXPERT


def test_all_sizes_are_whole_bytes() -> None:
    c = make_settings(tp=2, ep=2, pp=2)
    c = replace(c, run=replace(c.run, checkpoint_every=1, background_saves=True))
    memory = memory_of(c, world_size=8)
    assert {type(value) for value in vars(memory).values()} == {int}


def make_engine_settings(**engine: Any) -> Configuration:
    c = make_settings()
    values: dict[str, Any] = {"max_running_requests": 5, "dtype": "float32"}
    return replace(c, engine=replace(c.engine, **(values | engine)))


def test_engines_cache_keys_and_values_of_all_requests() -> None:
    c = make_engine_settings(tp=2)
    memory = engine_memory(c, SMALL)
    assert memory.parameters == 4 * -(-num_parameters(SMALL) // 2)
    assert memory.kv_cache == 5 * 20 * 4 * 2 * 1 * 4 * 4
    small_cache = make_engine_settings(tp=2, max_total_tokens=30)
    assert engine_memory(small_cache, SMALL).kv_cache == 30 * 4 * 2 * 1 * 4 * 4
    latent = replace(SMALL, latent=LatentAttention(None, 6, 2, 2, 4))
    assert engine_memory(c, latent).kv_cache == 5 * 20 * 4 * (6 + 2) * 4


def test_engines_in_fp8_hold_matrices_in_bytes_and_a_scale_for_each_block() -> None:
    """By hand: attention 384, the MLP of layer 1 768, the experts of the others 1536."""
    fp8 = make_engine_settings(quantization="fp8")
    matrices = 4 * 384 + 768 + 3 * 1536
    others = 4 * (num_parameters(SMALL) - matrices)
    assert engine_memory(fp8, SMALL).parameters == others + -(-matrices * (128**2 + 4) // 128**2)
    first = make_engine_settings(quantization="fp8", unquantized_first_layers=1)
    more = engine_memory(first, SMALL).parameters - engine_memory(fp8, SMALL).parameters
    assert more == pytest.approx((384 + 1536) * (4 - 1 - 4 / 128**2), abs=1)


@pytest.mark.parametrize(
    ("name", "count"), [("qwen3_30b_a3b", 30_532_122_624), ("qwen3_235b_a22b", 235_093_634_560)]
)
def test_published_models_have_their_published_size(name: str, count: int) -> None:
    from megatron_rl.models.families import read_shape

    folder = Path(__file__).parents[1] / "support" / "published" / name
    assert num_parameters(read_shape(folder)) == count
