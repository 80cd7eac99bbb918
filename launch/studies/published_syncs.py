"""Times of weight syncs that others published, and the fit of two constants to some of them.

All of them send from a Megatron trainer to engines on other GPUs, without loading from a disk.
`launch/studies/sync_time.py` prints them beside the model's estimates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.models.shape import LatentAttention, ModelShape, Router
from megatron_rl.planning.sync_time import (
    Engines,
    Fit,
    Rates,
    SentDtype,
    SyncJob,
    Trainer,
    Way,
    sync_time,
)


def _qwen3_moe(layers: int, width: int, heads: int, inner: int, expert_inner: int) -> ModelShape:
    return ModelShape(
        architecture="Qwen3MoeForCausalLM",
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        qk_norm=True,
        ffn_hidden_size=inner,
        vocab_size=151936,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        eos_token_ids=(151645,),
        moe_layers=tuple(range(layers)),
        num_experts=128,
        topk=8,
        moe_ffn_hidden_size=expert_inner,
    )


def _deepseek(heads: int, dense_layers: int, experts: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        architecture="DeepseekV3ForCausalLM",
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=192,
        qk_norm=False,
        ffn_hidden_size=18432,
        vocab_size=vocabulary,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        tie_word_embeddings=False,
        max_position_embeddings=163840,
        eos_token_ids=(1,),
        latent=LatentAttention(
            q_rank=1536, kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128
        ),
        moe_layers=tuple(range(dense_layers, 61)),
        num_experts=experts,
        topk=8,
        moe_ffn_hidden_size=2048,
        shared_ffn_hidden_size=2048,
        router=Router(score="sigmoid", bias=True),
    )


QWEN3_30B = _qwen3_moe(48, 2048, 32, 6144, 768)
QWEN3_235B = _qwen3_moe(94, 4096, 64, 12288, 1536)
DEEPSEEK_V3 = _deepseek(128, 3, 256, 129280)
KIMI_K2 = _deepseek(64, 1, 384, 163840)

MILES = "https://lmsys.org/blog/2026-04-29-p2p-update"
NEMO_RESHARD = "https://github.com/NVIDIA-NeMo/RL/pull/2413"
NEMO_MERGED = "https://github.com/NVIDIA-NeMo/RL/pull/2971"
SLIME = "https://hebiao064.github.io/rl-weight-sync-chinese"


@dataclass(frozen=True)
class PublishedSync:
    """One published time.

    job: None if the way of sending is none of the model's. seconds: lowest and highest.
    is_fitted: the constants are fitted to it. source: its address.
    """

    framework: str
    model: str
    layout: str
    hardware: str
    seconds: tuple[float, float]
    source: str
    job: SyncJob | None
    is_fitted: bool = False

    @property
    def middle(self) -> float:
        """The geometric middle of the seconds."""
        return math.sqrt(self.seconds[0] * self.seconds[1])


_H100 = "H100, InfiniBand"
_DGX = "DGX H100"


def _miles(
    name: str, shape: ModelShape, dtype: SentDtype, trainer: Trainer, engines: Engines
) -> list[PublishedSync]:
    """Both rows of miles for one model. Its broadcast is slime's, from which miles is forked."""
    times = {
        QWEN3_30B: (2.670, 2.1602),
        QWEN3_235B: (10.7536, 3.1620),
        KIMI_K2: (53.2791, 7.2273),
    }
    broadcast, point_to_point = times[shape]
    layout = _layout(trainer, engines)
    rows = (
        ("miles, slime: broadcast", Way.TREE, broadcast),
        ("miles: P2P", Way.SHARDS, point_to_point),
    )
    return [
        PublishedSync(
            framework=framework,
            model=name,
            layout=layout,
            hardware=_H100,
            seconds=(seconds, seconds),
            source=MILES,
            job=SyncJob(shape, trainer, engines, dtype, way),
            is_fitted=way is Way.TREE,
        )
        for framework, way, seconds in rows
    ]


def _nemo(
    name: str, shape: ModelShape, trainer: Trainer, engines: Engines, low: float, high: float
) -> PublishedSync:
    return PublishedSync(
        framework="NeMo-RL: NCCL reshard",
        model=name,
        layout=_layout(trainer, engines),
        hardware=_DGX,
        seconds=(low, high),
        source=NEMO_RESHARD,
        job=SyncJob(shape, trainer, engines, "bfloat16", Way.SHARDS),
    )


def _merged_nemo(name: str, dtype: SentDtype, low: float, high: float) -> PublishedSync:
    trainer = Trainer(16, pp=2, ep=8)
    engines = Engines(16, 2)
    return PublishedSync(
        framework="NeMo-RL: merged fallback",
        model=name,
        layout=_layout(trainer, engines),
        hardware=_DGX,
        seconds=(low, high),
        source=NEMO_MERGED,
        job=SyncJob(QWEN3_30B, trainer, engines, dtype, Way.SHARDS),
    )


def _layout(trainer: Trainer, engines: Engines) -> str:
    sizes = f"tp{trainer.tp} pp{trainer.pp} ep{trainer.ep} on {trainer.gpus}"
    return f"{sizes} → {engines.count} x tp{engines.tp}"


PUBLISHED: tuple[PublishedSync, ...] = (
    *_miles("30B bf16", QWEN3_30B, "bfloat16", Trainer(16, tp=4, ep=8), Engines(16, 8)),
    *_miles("235B bf16", QWEN3_235B, "bfloat16", Trainer(64, tp=4, pp=4, ep=16), Engines(64, 32)),
    *_miles("1T fp8", KIMI_K2, "fp8", Trainer(256, tp=8, pp=8, ep=32), Engines(256, 32)),
    _nemo("30B bf16", QWEN3_30B, Trainer(16, pp=2, ep=8), Engines(16, 2), 0.51, 0.55),
    _nemo("235B bf16", QWEN3_235B, Trainer(128, tp=4, pp=8, ep=16), Engines(128, 8), 4.56, 4.85),
    _nemo("671B bf16", DEEPSEEK_V3, Trainer(256, pp=16, ep=16), Engines(256, 32), 7.65, 9.94),
    _merged_nemo("30B bf16", "bfloat16", 1.21, 1.52),
    _merged_nemo("30B fp8", "fp8", 3.20, 4.30),
    PublishedSync(
        framework="slime: colocated, CUDA IPC",
        model="30B bf16",
        layout="8 GPUs hold both",
        hardware="8 x H100",
        seconds=(7.0, 7.0),
        source=SLIME,
        job=None,
    ),
)

# The grid is laid around the best point again and again, each time narrower.
_GRID = 21
_ROUNDS = 12
_NARROWING = 0.4
_START = Fit(network_share=0.6, tensor=5e-5)
_START_WIDTH = math.log(30)


def fit(rows: Sequence[PublishedSync]) -> Fit:
    """Fit the two constants to the rows with `is_fitted`.

    It minimises the sum of squared logarithms of estimate over published time. A NIC carries at
    most its own rate.
    """
    best = _START
    width = _START_WIDTH
    for _ in range(_ROUNDS):
        steps = [width * (2 * i / (_GRID - 1) - 1) for i in range(_GRID)]
        candidates = [
            Fit(min(1.0, best.network_share * math.exp(x)), best.tensor * math.exp(y))
            for x, y in itertools.product(steps, steps)
        ]
        best = min(candidates, key=lambda candidate: _misfit(rows, candidate))
        width *= _NARROWING
    return best


def _misfit(rows: Sequence[PublishedSync], candidate: Fit) -> float:
    rates = Rates(candidate)
    return sum(
        math.log(sync_time(row.job, rates).total / row.middle) ** 2
        for row in rows
        if row.is_fitted and row.job is not None
    )
