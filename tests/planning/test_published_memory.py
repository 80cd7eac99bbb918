"""The estimate against memory that NVIDIA published for Megatron (docs/rehearsal.md)."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_rl.config.schema import Configuration, ParallelSettings
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.memory import rank_memory
from tests.support.configurations import configuration_of

PUBLISHED = Path(__file__).parents[1] / "support" / "published"
GIB = 2**30
MIXTRAL = read_shape(PUBLISHED / "mixtral_8x7b")
LARGE_MIXTRAL = replace(
    MIXTRAL,
    num_layers=56,
    moe_layers=tuple(range(56)),
    hidden_size=6144,
    moe_ffn_hidden_size=16384,
    num_attention_heads=48,
)


def make_settings(parallel: ParallelSettings) -> Configuration:
    """Settings of pre-training in bfloat16 with one sequence of 4096 tokens a micro-batch."""
    c = configuration_of(["experiment=smoke"])
    return replace(
        c,
        parallel=parallel,
        model=replace(c.model, dtype="bfloat16", recompute="none"),
        train=replace(c.train, tokens_per_micro_batch=4096),
    )


def test_deepseek_v3_needs_what_table_3_of_the_megatron_core_report_says() -> None:
    """arXiv 2603.07685, table 3, on 256 GPUs: its middle stages hold 16 layers with experts."""
    shape = read_shape(PUBLISHED / "deepseek_v3")
    shape = replace(shape, num_layers=64, moe_layers=tuple(range(3, 64)))
    c = make_settings(ParallelSettings(pp=4, vpp=4, ep=64))
    memory = rank_memory(c, shape, world_size=256, stage=1)
    assert (memory.parameters + memory.gradients) / GIB == pytest.approx(36.4, rel=0.01)
    assert memory.optimizer / GIB == pytest.approx(32.1, rel=0.01)


@dataclass(frozen=True)
class Run:
    """A release run of Megatron-LM's functional tests.

    gpu_bytes: memory of the last rank between steps, on an A100.
    """

    shape: ModelShape
    parallel: ParallelSettings
    ranks: int
    gpu_bytes: int


RUNS = {
    "mixtral_8x7b_tp1pp4ep8vpp8_release": Run(
        MIXTRAL,
        ParallelSettings(tp=2, pp=4, vpp=8, ep=8, etp=1),
        64,
        19_085_930_496,
    ),
    "mixtral_8x7b_alltoall_tp2pp4ep4_release": Run(
        replace(MIXTRAL, vocab_size=256_000),
        ParallelSettings(tp=2, pp=4, ep=4, etp=2),
        128,
        17_449_066_496,
    ),
    "mixtral_8x22b_tp2pp8ep8vpp1_release": Run(
        LARGE_MIXTRAL,
        ParallelSettings(tp=2, pp=8, ep=8, etp=2),
        128,
        22_284_785_664,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_mixtral_holds_what_megatron_measured_between_steps(name: str) -> None:
    """Weights, gradients and optimizer. The rest is the workspace of Transformer Engine."""
    run = RUNS[name]
    c = make_settings(run.parallel)
    memory = rank_memory(c, run.shape, world_size=run.ranks, stage=run.parallel.pp - 1)
    static_bytes = memory.parameters + memory.gradients + memory.optimizer
    assert static_bytes < run.gpu_bytes
    assert static_bytes == pytest.approx(run.gpu_bytes, rel=0.03)
