"""Seconds that a weight sync takes on a GPU cluster, computed from layouts and rates alone.

Nothing here was measured by this project: it has not run on several GPUs. The rates are of four
kinds. The vendor publishes `Hardware`. `HASH_TRAFFIC` is counted in this source. `Assumptions` are
guesses. `Fit` is fitted to times that others published (`launch/studies/published_syncs.py`).
`python -m launch.studies.sync_time` prints all of them.

The model leaves out latencies inside collectives, contention in switches, and stages of unequal
size. Experts are spread evenly over expert-parallel ranks, and parameters over pipeline stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from megatron_rl.models.parameter_count import (
    attention_parameters,
    dense_mlp_parameters,
    expert_parameters,
    num_parameters,
    shared_moe_parameters,
)
from megatron_rl.models.shape import ModelShape

SentDtype = Literal["bfloat16", "fp8"]
BFLOAT16_BYTES = 2
# One float32 scale for each block of 128 x 128 codes
FP8_BYTES = 1 + 4 / 128**2
# Of a stage with fewer expert-parallel ranks
MAX_OWNERS = 8
# Bytes of memory traffic for each byte that the trainer hashes (`GpuDigest`: eager operations on
# 64-bit copies of 32-bit words). tests/planning/test_sync_time.py counts them.
HASH_TRAFFIC = 195
# Requests around the buckets of a sync: pause, old session, begin, end, flush, resume
REQUESTS = 6


class Way(StrEnum):
    """A way to send weights from the trainer to the engines.

    SOURCE: rank 0 collects the model, and sends all of it to one engine after the other.
    LANES: every owner sends its part straight to every engine, engines in rotation. An engine takes
        one lane at a time. Each expert-parallel rank has an owner, and up to eight ranks of a stage
        own equal parts (`mcore/weights/owners.py`).
    TREE: one broadcast reaches all engines. Pipeline stages take turns as its source.
    SHARDS: every GPU of an engine receives its part only, from any rank. Peers have it; this
        project has not.
    """

    SOURCE = "source"
    LANES = "lanes"
    TREE = "tree"
    SHARDS = "shards"


def rate(value: float, unit: str, source: str) -> Any:
    """Declare a constant with its unit and its source."""
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Hardware:
    """Published rates of an H100 node. Rates count one direction."""

    gpus_per_node: int = rate(
        8, "GPUs", "DGX H100 user guide, docs.nvidia.com/dgx/dgxh100-user-guide"
    )
    nic: float = rate(50e9, "bytes/s a GPU", "the same: one ConnectX-7 of 400 Gbit/s for each GPU")
    nvlink: float = rate(450e9, "bytes/s a GPU", "H100 SXM data sheet: 900 GB/s both ways")
    memory: float = rate(3.35e12, "bytes/s", "H100 SXM data sheet")
    memory_bytes: float = rate(80e9, "bytes", "H100 SXM data sheet")


@dataclass(frozen=True)
class Assumptions:
    """Guesses. No measurement stands behind them."""

    nvlink_share: float = rate(0.8, "of nvlink", "a ring of large messages")
    memory_share: float = rate(0.8, "of memory", "kernels that only read and write")
    request: float = rate(0.005, "s", "one request to an engine and its answer")
    trainer_bytes: float = rate(18, "bytes a parameter", "weight, gradient and Adam's state")
    usable_share: float = rate(0.9, "of memory_bytes", "largest share for an engine's weights")


@dataclass(frozen=True)
class Fit:
    """Constants that are fitted to published times of other frameworks.

    network_share: share of a NIC's rate that a stream of buckets reaches.
    tensor: seconds for each tensor under its Hugging Face name, in trainer and engine together.
    """

    network_share: float
    tensor: float


@dataclass(frozen=True)
class Rates:
    """All constants of the model."""

    fit: Fit
    hardware: Hardware = Hardware()
    assumptions: Assumptions = Assumptions()

    @property
    def nic(self) -> float:
        """Bytes a second that a stream carries over one NIC."""
        return self.hardware.nic * self.fit.network_share

    @property
    def nvlink(self) -> float:
        """Bytes a second that a GPU receives over NVLink."""
        return self.hardware.nvlink * self.assumptions.nvlink_share

    @property
    def memory(self) -> float:
        """Bytes a second that a kernel reads and writes."""
        return self.hardware.memory * self.assumptions.memory_share


@dataclass(frozen=True)
class Trainer:
    """Layout of the trainer. Experts are not split by tensor parallelism (etp 1).

    Raises ValueError for a layout that does not fill the GPUs evenly.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "gpus": self.gpus}
        if min(sizes.values()) < 1:
            raise ValueError(f"trainer {sizes}: every size must be at least 1")
        if self.gpus % (self.tp * self.pp) or self.gpus % (self.ep * self.pp):
            raise ValueError(
                f"trainer {sizes}: pp x tp and pp x ep must divide the number of GPUs; "
                "choose other sizes"
            )

    @property
    def owners(self) -> int:
        """Ranks of a stage that send with `Way.LANES`."""
        copies_of_experts = self.gpus // self.pp // self.ep
        return self.ep * min(max(1, MAX_OWNERS // self.ep), copies_of_experts)


@dataclass(frozen=True)
class Engines:
    """Engines of equal size. Raises ValueError if they do not fill the GPUs."""

    gpus: int
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.gpus < 1 or self.gpus % self.tp:
            raise ValueError(
                f"engines: {self.gpus} GPUs cannot hold engines of {self.tp}; "
                "the size of an engine must divide the number of GPUs"
            )

    @property
    def count(self) -> int:
        return self.gpus // self.tp


@dataclass(frozen=True)
class SyncJob:
    """One weight sync: the model, who sends it, who receives it, and how.

    buffers: 1, or 2 to collect the next bucket while the last one is sent.
    """

    shape: ModelShape
    trainer: Trainer
    engines: Engines
    dtype: SentDtype
    way: Way
    buffers: Literal[1, 2] = 1
    bucket_bytes: float = 2**30


class Stream(NamedTuple):
    """Everything that one engine receives.

    dense, experts: bytes. codes: parameters that are sent as FP8. tensors: their number, scales
    included.
    """

    dense: float
    experts: float
    codes: int
    tensors: int

    @property
    def total(self) -> float:
        return self.dense + self.experts


class SyncTime(NamedTuple):
    """Seconds of each step of a sync, and of the whole sync.

    gather, quantise: on the rank that takes longest. send: until the last engine has the last byte.
    load: the engines' cost for each tensor and bucket. flush: the requests around the buckets.
    audit: on top of `total`, in the syncs that are audited.
    """

    gather: float
    quantise: float
    send: float
    load: float
    flush: float
    audit: float
    total: float


def count_stream(shape: ModelShape, dtype: SentDtype) -> Stream:
    """Count what one engine receives.

    In FP8, matrices of attention, of MLPs and of experts are codes and scales. Norms, routers and
    the vocabulary's tables stay bfloat16.
    """
    moe_layers = len(shape.moe_layers)
    dense_layers = shape.num_layers - moe_layers
    experts = moe_layers * shape.num_experts * expert_parameters(shape)
    dense = num_parameters(shape) - experts
    dense_matrices = (
        shape.num_layers * attention_parameters(shape).split
        + dense_layers * dense_mlp_parameters(shape).split
        + moe_layers * shared_moe_parameters(shape).split
    )
    matrices = _count_matrices(shape)
    tensors = matrices + _count_other_tensors(shape)
    if dtype == "bfloat16":
        return Stream(BFLOAT16_BYTES * dense, BFLOAT16_BYTES * experts, 0, tensors)
    dense_bytes = FP8_BYTES * dense_matrices + BFLOAT16_BYTES * (dense - dense_matrices)
    codes = experts + dense_matrices
    return Stream(dense_bytes, FP8_BYTES * experts, codes, tensors + matrices)


def _count_matrices(shape: ModelShape) -> int:
    """Count the matrices that FP8 quantises, under their Hugging Face names."""
    moe_layers = len(shape.moe_layers)
    compresses_queries = shape.latent is not None and shape.latent.q_rank is not None
    attention = 5 if compresses_queries else 4
    shared_expert = 3 if shape.shared_ffn_hidden_size else 0
    return (
        shape.num_layers * attention
        + (shape.num_layers - moe_layers) * 3
        + moe_layers * (3 * shape.num_experts + shared_expert)
    )


def _count_other_tensors(shape: ModelShape) -> int:
    """Count norms, routers with their biases, and the vocabulary's tables."""
    if shape.latent is None:
        head_norms = 2 * shape.qk_norm
    else:
        head_norms = 1 + (shape.latent.q_rank is not None)
    router = 2 if shape.router.bias else 1
    tables = 1 if shape.tie_word_embeddings else 2
    layers = shape.num_layers * (2 + head_norms) + len(shape.moe_layers) * router
    return layers + tables + 1


def sync_time(job: SyncJob, rates: Rates) -> SyncTime:
    """Estimate the seconds of a weight sync."""
    stream = count_stream(job.shape, job.dtype)
    # The trainer holds, and collects, bfloat16.
    plain = count_stream(job.shape, "bfloat16")
    parts = _parts_of_senders(job)
    gather = _gather_seconds(job, plain, rates)
    quantise = stream.codes * parts * (BFLOAT16_BYTES + FP8_BYTES) / rates.memory
    send = _sent_bytes(job, stream) / rates.nic
    num_buckets = math.ceil(stream.total / job.bucket_bytes)
    load = stream.tensors * rates.fit.tensor + num_buckets * rates.assumptions.request
    flush = REQUESTS * rates.assumptions.request
    buckets_of_sender = math.ceil(stream.total * parts / job.bucket_bytes)
    moving = _overlap(job, gather + quantise, send + load, buckets_of_sender)
    audit = _audit_seconds(job, plain, rates)
    return SyncTime(gather, quantise, send, load, flush, audit, moving + flush)


def _parts_of_senders(job: SyncJob) -> float:
    """Return the largest share of the model that one rank prepares."""
    match job.way:
        case Way.SOURCE:
            return 1.0
        case Way.TREE:
            return 1 / job.trainer.pp
        case Way.LANES:
            return 1 / (job.trainer.pp * job.trainer.owners)
        case Way.SHARDS:
            return 1 / job.trainer.gpus


def _sent_bytes(job: SyncJob, stream: Stream) -> float:
    """Return the bytes that the busiest NIC carries, one after the other."""
    engines = job.engines
    match job.way:
        case Way.SOURCE:
            return engines.count * stream.total
        case Way.TREE:
            return stream.total
        case Way.LANES:
            part = stream.total * _parts_of_senders(job)
            return max(stream.total, engines.count * part)
        case Way.SHARDS:
            part = stream.total / engines.tp
            return max(part, engines.count * stream.total / job.trainer.gpus)


def _gather_seconds(job: SyncJob, plain: Stream, rates: Rates) -> float:
    """Return the seconds in which the senders collect what they send, stages at the same time."""
    trainer = job.trainer
    dense = plain.dense / trainer.pp
    experts = plain.experts / trainer.pp
    if job.way is Way.LANES:
        # An owner gathers its share of the dense tensors, and has its experts already.
        return _all_gather(dense / trainer.owners, trainer.tp, rates)
    seconds = _all_gather(dense, trainer.tp, rates) + _all_gather(experts, trainer.ep, rates)
    if job.way is Way.SOURCE:
        seconds += plain.total * (1 - 1 / trainer.pp) / rates.nic
    return seconds


def _all_gather(num_bytes: float, ranks: int, rates: Rates) -> float:
    """Return the seconds in which consecutive ranks get all shards of `num_bytes`.

    Between nodes, the NICs of a node share what it receives.
    """
    node = rates.hardware.gpus_per_node
    inside = num_bytes * (1 - 1 / ranks) / rates.nvlink
    if ranks <= node:
        return inside
    across = num_bytes * (1 - node / ranks) / (node * rates.nic)
    return max(inside, across)


def _overlap(job: SyncJob, prepare: float, deliver: float, num_buckets: int) -> float:
    """Return the seconds of preparing and delivering all buckets.

    deliver: with `Way.TREE`, of all stages together. Each has a buffer of its own, so that one
    prepares while others send.
    """
    if job.buffers == 2:
        # The first bucket is prepared, or the last one delivered, alone.
        return max(prepare, deliver) + min(prepare, deliver) / num_buckets
    if job.way is Way.TREE:
        return max(deliver, prepare + deliver / job.trainer.pp)
    return prepare + deliver


def _audit_seconds(job: SyncJob, plain: Stream, rates: Rates) -> float:
    """Return the seconds that an audit by value adds.

    Rank 0 hashes every byte. Unless it sends all of them, they reach it over its NIC. Then engines
    hash what each GPU holds.
    """
    expectation = plain.total * HASH_TRAFFIC / rates.memory
    second_stream = 0.0 if job.way is Way.SOURCE else plain.total / rates.nic
    return max(expectation, second_stream) + plain.total / job.engines.tp / rates.memory


def obstacle(job: SyncJob, rates: Rates) -> str:
    """Return the reason why a job cannot exist on these GPUs, or an empty string.

    A trainer needs room for its state, and an engine for its weights beside a cache. Both are lower
    bounds: `planning/memory.py` estimates what a run really needs.
    """
    assumptions = rates.assumptions
    memory = rates.hardware.memory_bytes
    state = num_parameters(job.shape) * assumptions.trainer_bytes / job.trainer.gpus
    weights = count_stream(job.shape, job.dtype).total / job.engines.tp
    if state > memory:
        return f"trainer state needs {state / 1e9:.0f} GB a GPU"
    if weights > memory * assumptions.usable_share:
        return f"an engine's weights need {weights / 1e9:.0f} GB a GPU"
    return ""


class ConstantRow(NamedTuple):
    """A constant as the command prints it."""

    kind: str
    name: str
    value: float
    unit: str
    source: str


def list_constants(rates: Rates, fit_source: str) -> list[ConstantRow]:
    """List every constant with its kind. fit_source: what `Fit` is fitted to."""
    rows = []
    for kind, group in (("published", rates.hardware), ("assumption", rates.assumptions)):
        for item in fields(group):
            value = getattr(group, item.name)
            unit = item.metadata["unit"]
            rows.append(ConstantRow(kind, item.name, value, unit, item.metadata["source"]))
    digest = "operations of GpuDigest (sglang_bridge/weights/digests.py)"
    rows.append(ConstantRow("counted", "hash_traffic", HASH_TRAFFIC, "bytes a byte", digest))
    rows.append(
        ConstantRow("fitted", "network_share", rates.fit.network_share, "of nic", fit_source)
    )
    rows.append(ConstantRow("fitted", "tensor", rates.fit.tensor, "s a tensor", fit_source))
    return rows
