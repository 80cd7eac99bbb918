"""The model of sync time against numbers worked out by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.mcore.weights.owners import Grid, Unit, owners_of_stage
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import LatentAttention, ModelShape
from megatron_rl.planning.sync_time import (
    HASH_TRAFFIC,
    Assumptions,
    Engines,
    Fit,
    Hardware,
    Rates,
    SyncJob,
    Trainer,
    Way,
    count_stream,
    obstacle,
    sync_time,
)
from sglang_bridge.weights.digests import GpuDigest

PUBLISHED = Path(__file__).parents[1] / "support" / "published"
# 2 layers, each: attention 192 + norm 8, norm 8, router 32, experts 4 x 96. Tables 160, norm 8.
# Experts 768 parameters, all others 648, of which 384 are matrices.
SMALL = ModelShape(
    architecture="",
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    qk_norm=False,
    ffn_hidden_size=16,
    vocab_size=10,
    rope_theta=1.0,
    rms_norm_eps=1.0,
    initializer_range=1.0,
    tie_word_embeddings=False,
    max_position_embeddings=1,
    eos_token_ids=(),
    moe_layers=(0, 1),
    num_experts=4,
    topk=1,
    moe_ffn_hidden_size=4,
)
# 50 bytes a second over a NIC, 1,000 over NVLink, 10,000 in memory; 2 GPUs a node
RATES = Rates(
    Fit(network_share=0.5, tensor=0.001),
    Hardware(gpus_per_node=2, nic=100, nvlink=1000, memory=10_000, memory_bytes=8_000),
    Assumptions(nvlink_share=1, memory_share=1, request=0.1),
)
JOB = SyncJob(
    SMALL, Trainer(4, tp=2, pp=2, ep=2), Engines(4, 2), "bfloat16", Way.LANES, bucket_bytes=1000
)
# Each engine receives 2,832 bytes: 1,296 and 1,536 of experts
SOURCE = replace(JOB, way=Way.SOURCE)
TREE = replace(JOB, way=Way.TREE)
SHARDS = replace(JOB, way=Way.SHARDS)


def test_stream_in_bfloat16() -> None:
    stream = count_stream(SMALL, "bfloat16")
    assert (stream.dense, stream.experts, stream.total) == (1296, 1536, 2832)
    # A layer has 4 matrices of attention, 12 of experts, 2 norms and a router.
    assert stream.tensors == 2 * (4 + 12 + 2 + 1) + 3
    assert stream.codes == 0


def test_stream_in_fp8_has_scales() -> None:
    stream = count_stream(SMALL, "fp8")
    scale = 4 / 16384
    assert stream.codes == 768 + 384
    assert stream.experts == pytest.approx(768 * (1 + scale))
    assert stream.dense == pytest.approx(384 * (1 + scale) + 2 * 264)
    assert stream.tensors == 41 + 2 * (4 + 12)


def test_names_of_latent_attention_and_shared_experts_are_counted() -> None:
    latent = LatentAttention(None, 4, 2, 2, 4)
    plain = replace(SMALL, latent=latent)
    assert count_stream(plain, "bfloat16").tensors == 41 + 2  # q, kv_a, kv_b, o and one norm
    compressing = replace(SMALL, latent=replace(latent, q_rank=4))
    assert count_stream(compressing, "bfloat16").tensors == 41 + 2 * 3
    with_shared_expert = replace(SMALL, shared_ffn_hidden_size=4)
    assert count_stream(with_shared_expert, "fp8").tensors == 73 + 2 * 3 * 2
    assert count_stream(with_shared_expert, "fp8").codes == 1152 + 2 * 96
    dense_layer = replace(SMALL, moe_layers=(1,))
    assert count_stream(dense_layer, "bfloat16").tensors == 41 - 12 - 1 + 3


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("qwen3_30b_a3b", 18867),  # model.safetensors.index.json
        ("qwen3_235b_a22b", 36945),  # as github.com/vllm-project/vllm/pull/43375 counts
        # 61 x (5 + 4), a dense MLP, and 60 x (3 x 384 experts, a shared one, a router, its bias)
        ("kimi_k2", 61 * 9 + 3 + 60 * (1152 + 3 + 2) + 3),
    ],
)
def test_tensors_of_published_models(name: str, tensors: int) -> None:
    assert count_stream(read_shape(PUBLISHED / name), "bfloat16").tensors == tensors


def test_kimi_k2_has_a_trillion_parameters() -> None:
    stream = count_stream(read_shape(PUBLISHED / "kimi_k2"), "bfloat16")
    assert stream.total == 2 * 1_026_408_209_408
    assert stream.experts == 2 * 60 * 384 * 3 * 7168 * 2048


@pytest.mark.parametrize(
    ("job", "gather"),
    [
        # Of a stage: half of 648 dense bytes and half of 768 of experts over NVLink
        (TREE, 0.324 + 0.384),
        (SHARDS, 0.324 + 0.384),
        # Each of the two owners gathers half of the dense bytes, and has its experts already.
        (JOB, 0.162),
        # The other stage's 1,416 bytes reach rank 0 over its NIC.
        (SOURCE, 0.324 + 0.384 + 28.32),
    ],
)
def test_gather(job: SyncJob, gather: float) -> None:
    assert sync_time(job, RATES).gather == pytest.approx(gather)


def test_a_gather_over_two_nodes_shares_their_nics() -> None:
    trainer = Trainer(4, ep=4)
    seconds = sync_time(replace(TREE, trainer=trainer), RATES).gather
    # Half of 1,536 bytes enters each node over two NICs. That takes longer than NVLink.
    assert seconds == pytest.approx(1536 / 2 / (2 * 50))


@pytest.mark.parametrize(
    ("trainer", "owners"),
    [
        (Trainer(4, tp=2, pp=2, ep=2), 2),  # every rank of the stage
        (Trainer(16, ep=2), 8),  # four of eight copies of the experts
        (Trainer(12, pp=2, ep=3), 6),  # both copies
        (Trainer(16, ep=16), 16),  # experts are never gathered
        (Trainer(64, tp=8), 8),
    ],
)
def test_owners_are_those_of_the_transport(trainer: Trainer, owners: int) -> None:
    assert trainer.owners == owners
    grid = Grid(trainer.gpus, tp=trainer.tp, pp=trainer.pp, ep=trainer.ep)
    units = [Unit(f"{i}", 1, i % trainer.ep) for i in range(64 * trainer.ep)]
    assert len({owner.rank for owner in owners_of_stage(units, grid, 0).values()}) == owners


@pytest.mark.parametrize(
    ("job", "send"),
    [
        (SOURCE, 2 * 2832 / 50),
        (TREE, 2832 / 50),
        # An engine takes one lane at a time.
        (JOB, 2832 / 50),
        # Each of four owners sends 708 bytes to 8 engines.
        (replace(JOB, engines=Engines(16, 2)), 8 * 708 / 50),
        # A GPU receives half a model. Four ranks send two models.
        (SHARDS, 1416 / 50),
        (replace(SHARDS, engines=Engines(16, 2)), 8 * 2832 / 4 / 50),
    ],
)
def test_send(job: SyncJob, send: float) -> None:
    assert sync_time(job, RATES).send == pytest.approx(send)


def test_load_and_flush() -> None:
    time = sync_time(JOB, RATES)
    assert time.load == pytest.approx(41 * 0.001 + 3 * 0.1)
    assert time.flush == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("way", "codes"),
    [(Way.SOURCE, 1152), (Way.TREE, 576), (Way.LANES, 288), (Way.SHARDS, 288)],
)
def test_quantise(way: Way, codes: float) -> None:
    time = sync_time(replace(JOB, dtype="fp8", way=way), RATES)
    assert time.quantise == pytest.approx(codes * (2 + 1 + 4 / 16384) / 10_000)
    assert sync_time(replace(JOB, way=way), RATES).quantise == 0


@pytest.mark.parametrize(
    ("job", "one", "two"),
    [
        (SOURCE, 29.028 + 113.28 + 0.341 + 0.6, 113.621 + 29.028 / 3 + 0.6),
        # An owner prepares 708 bytes: one bucket, so that nothing overlaps.
        (JOB, 0.162 + 56.64 + 0.341 + 0.6, 56.981 + 0.162 + 0.6),
        # One stage prepares while the other sends: 1,416 bytes are two buckets.
        (TREE, 56.981 + 0.6, 56.981 + 0.708 / 2 + 0.6),
    ],
)
def test_total(job: SyncJob, one: float, two: float) -> None:
    assert sync_time(job, RATES).total == pytest.approx(one)
    assert sync_time(replace(job, buffers=2), RATES).total == pytest.approx(two)


def test_preparing_longer_than_sending_is_what_two_buffers_cannot_hide() -> None:
    slow = replace(RATES, hardware=replace(RATES.hardware, nvlink=1))
    time = sync_time(replace(SOURCE, buffers=2), slow)
    assert time.gather == pytest.approx(324 + 384 + 28.32)
    assert time.total == pytest.approx(736.32 + 113.621 / 3 + 0.6)


def test_stages_of_a_tree_that_prepare_longer_than_all_send_are_waited_for() -> None:
    slow = replace(RATES, hardware=replace(RATES.hardware, nvlink=1))
    assert sync_time(TREE, slow).total == pytest.approx(708 + 56.981 / 2 + 0.6)


def test_audit() -> None:
    hashing = 2832 * HASH_TRAFFIC / 10_000
    engine = 1416 / 10_000
    assert sync_time(SOURCE, RATES).audit == pytest.approx(hashing + engine)
    # The second stream to rank 0 takes longer than hashing it.
    assert sync_time(JOB, RATES).audit == pytest.approx(2832 / 50 + engine)
    # SGLang hashes the dequantised values, so FP8 changes nothing.
    assert sync_time(replace(JOB, dtype="fp8"), RATES).audit == sync_time(JOB, RATES).audit


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write. Views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not any(view in func.name() for view in ("view", "slice", "detach")):
            leaves = tree_leaves((args, kwargs, result))
            self.num_bytes += sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        return result


def test_traffic_of_a_hash_is_that_of_its_operations() -> None:
    data = torch.zeros(4 * 32768, dtype=torch.uint8)
    digest = GpuDigest()
    with Traffic() as traffic:
        digest.update(data)
    assert round(traffic.num_bytes / len(data)) == HASH_TRAFFIC


def test_a_job_that_cannot_exist_is_named() -> None:
    # 1,416 parameters of 18 bytes on four GPUs are 6,372 bytes.
    assert obstacle(JOB, RATES) == ""
    small = replace(RATES, hardware=replace(RATES.hardware, memory_bytes=6000))
    assert obstacle(JOB, small).startswith("trainer state")
    # 1,416 bytes of weights: more than nine tenths of 1,500
    many = replace(JOB, trainer=Trainer(400, tp=2, pp=2, ep=2))
    tight = replace(RATES, hardware=replace(RATES.hardware, memory_bytes=1500))
    assert obstacle(many, tight).startswith("an engine's weights")


@pytest.mark.parametrize(
    "sizes", [{"tp": 3}, {"pp": 3}, {"ep": 16}, {"tp": 0}, {"pp": 4, "tp": 4}, {"gpus": 0}]
)
def test_trainer_layouts_that_do_not_fill_the_gpus_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="trainer"):
        Trainer(**{"gpus": 8, **sizes})


@pytest.mark.parametrize(("gpus", "tp"), [(8, 3), (8, 0), (0, 1)])
def test_engines_that_do_not_fill_the_gpus_are_refused(gpus: int, tp: int) -> None:
    with pytest.raises(ValueError, match="engines"):
        Engines(gpus, tp)
