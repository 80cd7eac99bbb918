"""The parallel layouts whose whole steps are compared with float64 steps.

The launcher refuses every kind of layout that is not here.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_rl.config.algorithms import (
    AlgoSettings,
    CispoSettings,
    EspoSettings,
    GrpoSettings,
    KlSettings,
)
from megatron_rl.config.schema import CreditSettings, Dtype, OptimizerSettings, ParallelSettings
from tests.support.float64_model import DENSE, MIXTRAL

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"norm_topk_prob": False, "tie_word_embeddings": True},
    "dense": DENSE,
    "mixtral": MIXTRAL,
    "odd": {"num_hidden_layers": 3},
}
ALGORITHMS: dict[str, AlgoSettings] = {
    "grpo": GrpoSettings(clip_low=0.03, clip_high=0.05),
    "espo": EspoSettings(alpha=0.012, min_clip=3e-3),
}
# CISPO with a KL penalty and an entropy bonus, large enough to change every step
REGULARIZED: dict[str, AlgoSettings] = {
    "cispo": CispoSettings(
        clip_low=0.03, clip_high=0.05, kl=KlSettings(coef=0.1), entropy_coef=0.1
    ),
}
CREDIT = CreditSettings(all_correct="zvp", all_incorrect="zvp", zvp_alpha=0.1)
OPTIMIZER = OptimizerSettings(
    lr=1e-3,
    warmup_steps=2,
    decay="linear",
    beta2=0.9,
    eps=1e-5,
    weight_decay=0.1,
    clip_grad=0.5,
)
TOTAL_STEPS = 6
TEMPERATURE = 0.8
BATCHES = 2
BATCH = 24  # rollouts in a batch
STEPS_PER_BATCH = 2


class Kind(NamedTuple):
    """The axes of a grid, apart from their sizes and from data parallelism.

    tp, pp, vpp, cp, ep: True if the axis is larger than 1.
    etp: the ranks over which an expert is split: none, the tensor-parallel ones, or others.
    """

    tp: bool
    pp: bool
    vpp: bool
    cp: bool
    ep: bool
    etp: Literal["1", "tp", "other"]

    @property
    def axes(self) -> set[str]:
        """The names of the axes larger than 1, without data parallelism."""
        return {name for name in ("tp", "pp", "vpp", "cp", "ep") if getattr(self, name)}


@dataclass(frozen=True)
class Layout:
    """A parallel grid on `ranks` processes, with the recomputation and dtype of the model."""

    ranks: int
    parallel: ParallelSettings
    recompute: Recompute = "none"
    dtype: Dtype = "float32"

    @property
    def kind(self) -> Kind:
        return kind_of(self.parallel)


def kind_of(parallel: ParallelSettings) -> Kind:
    """Return the kind of a grid."""
    return Kind(
        tp=parallel.tp > 1,
        pp=parallel.pp > 1,
        vpp=(parallel.vpp or 1) > 1,
        cp=parallel.cp > 1,
        ep=parallel.ep > 1,
        etp=_expert_split(parallel),
    )


def _expert_split(parallel: ParallelSettings) -> Literal["1", "tp", "other"]:
    etp = parallel.etp or parallel.default_etp
    if etp == 1:
        return "1"
    return "tp" if etp == parallel.tp else "other"


def grid(**sizes: int) -> ParallelSettings:
    """Return a grid whose ranks wait for each other on a busy machine."""
    return ParallelSettings(timeout_s=200, **sizes)


def _layouts(ranks: int, **grids: ParallelSettings) -> dict[str, Layout]:
    """Return a layout for each grid and each recomputation."""
    return {
        f"{name}-{recompute}": Layout(ranks, parallel, recompute)
        for name, parallel in grids.items()
        for recompute in RECOMPUTE
    }


# Every kind of grid, and each of its axes with every recomputation and in bfloat16.
LAYOUTS: dict[str, Layout] = {
    **_layouts(1, one=grid()),
    "dp2-none": Layout(2, grid()),
    **_layouts(
        2,
        ep2=grid(ep=2),
        tp2=grid(tp=2),
        pp2=grid(pp=2),
        pp2_vpp2=grid(pp=2, vpp=2),
        cp2=grid(cp=2),
    ),
    "tp2_ep2-none": Layout(2, grid(tp=2, ep=2)),
    "tp2_ep2-full": Layout(2, grid(tp=2, ep=2), "full"),
    "cp2_ep2-none": Layout(2, grid(cp=2, ep=2)),
    "tp2_ep2-bfloat16": Layout(2, grid(tp=2, ep=2), "full", "bfloat16"),
    "pp2_vpp2-bfloat16": Layout(2, grid(pp=2, vpp=2), "full", "bfloat16"),
    "cp2_ep2-bfloat16": Layout(2, grid(cp=2, ep=2), "full", "bfloat16"),
    "pp4-full": Layout(4, grid(pp=4), "full"),
    "tp2_ep2_etp2-full": Layout(4, grid(tp=2, ep=2, etp=2), "full"),
    "tp2_pp2-none": Layout(4, grid(tp=2, pp=2)),
    "tp2_pp2_ep2-full": Layout(4, grid(tp=2, pp=2, ep=2), "full"),
    "tp2_pp2_vpp2-none": Layout(4, grid(tp=2, pp=2, vpp=2)),
    "tp2_pp2_vpp2_ep2-full": Layout(4, grid(tp=2, pp=2, vpp=2, ep=2), "full"),
    "tp2_cp2-none": Layout(4, grid(tp=2, cp=2)),
    "tp2_cp2_ep2-full": Layout(4, grid(tp=2, cp=2, ep=2), "full"),
    "pp2_cp2-none": Layout(4, grid(pp=2, cp=2)),
    "pp2_cp2_ep2-full": Layout(4, grid(pp=2, cp=2, ep=2), "full"),
    "pp2_vpp2_cp2-full": Layout(4, grid(pp=2, vpp=2, cp=2), "full"),
    "pp2_vpp2_cp2_ep2-none": Layout(4, grid(pp=2, vpp=2, cp=2, ep=2)),
    "tp4_ep2-none": Layout(4, grid(tp=4, ep=2)),
    "ep4-none": Layout(4, grid(ep=4)),
    "tp2_cp2_ep2_etp2-none": Layout(4, grid(tp=2, cp=2, ep=2, etp=2)),
    "tp2_pp2_ep2_etp2-none": Layout(8, grid(tp=2, pp=2, ep=2, etp=2)),
    "tp2_pp2_vpp2_ep2_etp2-full": Layout(8, grid(tp=2, pp=2, vpp=2, ep=2, etp=2), "full"),
    "tp2_pp2_cp2-full": Layout(8, grid(tp=2, pp=2, cp=2), "full"),
    "tp2_pp2_cp2_ep2-none": Layout(8, grid(tp=2, pp=2, cp=2, ep=2)),
    "tp2_pp2_cp2_ep2_etp2-full": Layout(8, grid(tp=2, pp=2, cp=2, ep=2, etp=2), "full"),
    "tp2_pp2_vpp2_cp2-none": Layout(8, grid(tp=2, pp=2, vpp=2, cp=2)),
    "tp2_pp2_vpp2_cp2_ep2-full": Layout(8, grid(tp=2, pp=2, vpp=2, cp=2, ep=2), "full"),
    "tp2_pp2_vpp2_cp2_ep2_etp2-none": Layout(8, grid(tp=2, pp=2, vpp=2, cp=2, ep=2, etp=2)),
    **{
        f"{name}_dp2-none": Layout(4, parallel)
        for name, parallel in {
            "ep2": grid(ep=2),
            "tp2": grid(tp=2),
            "pp2": grid(pp=2),
            "tp2_ep2": grid(tp=2, ep=2),
            "pp2_ep2": grid(pp=2, ep=2),
            "pp2_vpp2_ep2": grid(pp=2, vpp=2, ep=2),
            "cp2_ep2": grid(cp=2, ep=2),
        }.items()
    },
}
RANKS = (1, 2, 4, 8)  # the sizes of the jobs that compare layouts
# With tied embeddings the first and the last stage hold the same tensor, and so do their
# distributed optimizers.
TIED = ("one-none", "tp2_ep2-none", "pp2_vpp2-none", "pp2_dp2-none")
# Other families, in grids that split experts, heads or columns, and layers that stages share
# unevenly.
OTHER_FAMILIES = {
    "dense": ("one-none", "tp2-full"),
    "mixtral": ("one-full", "tp2_ep2-none", "cp2_ep2-none"),
    "odd": ("pp2-none",),
}
# Layouts by ranks. This family has no float64 model, so that two ranks are compared with one.
DEEPSEEK = {1: ("one-none",), 2: ("ep2-none", "pp2-none")}
BOTH_ALGORITHMS = ("one-none", "tp2_ep2-none")
REGULARIZED_LAYOUTS = (
    "one-none",
    "dp2-none",
    "ep2-none",
    "tp2-full",
    "pp2-selective",
    "pp2_vpp2-none",
    "cp2-none",
    "tp2_ep2-bfloat16",
    "cp2_ep2-bfloat16",
    "tp2_pp2_ep2-full",
    "tp2_cp2_ep2-full",
)


def algorithm_settings(case: "LayoutCase", directory: Path) -> AlgoSettings:
    """Return the settings of a case. directory: holds the models and the references."""
    if case.algorithm in ALGORITHMS:
        return ALGORITHMS[case.algorithm]
    settings = REGULARIZED[case.algorithm]
    reference = str(reference_of(directory / case.model))
    return replace(settings, kl=replace(settings.kl, reference=reference))


def reference_of(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint's reference."""
    return checkpoint.with_name(f"{checkpoint.name}_reference")


@dataclass(frozen=True)
class LayoutCase:
    """One run: a layout, an algorithm and a model of `MODELS`."""

    layout: str
    algorithm: str
    model: str = "plain"

    def __str__(self) -> str:
        return f"{self.layout}:{self.algorithm}:{self.model}"

    @classmethod
    def parse(cls, name: str) -> "LayoutCase":
        """Return the case of a name LAYOUT:ALGORITHM:MODEL."""
        return cls(*name.split(":"))


def cases_of(ranks: int) -> list[LayoutCase]:
    """Return the cases on `ranks` processes.

    Every layout runs with one algorithm in turn, some with both. Some also run with CISPO, a KL
    penalty and an entropy bonus, with tied embeddings, or with another family of models.
    """
    names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks]
    cases = {
        LayoutCase(name, _algorithm(turn, LAYOUTS[name].dtype)) for turn, name in enumerate(names)
    }
    for name in set(BOTH_ALGORITHMS) & set(names):
        cases |= {LayoutCase(name, algorithm) for algorithm in ALGORITHMS}
    cases |= {
        LayoutCase(name, algorithm)
        for name in set(REGULARIZED_LAYOUTS) & set(names)
        for algorithm in REGULARIZED
    }
    cases |= {LayoutCase(name, "grpo", "tied") for name in set(TIED) & set(names)}
    for model, layouts in OTHER_FAMILIES.items():
        cases |= {LayoutCase(name, "grpo", model) for name in set(layouts) & set(names)}
    return sorted(cases, key=lambda case: (names.index(case.layout), str(case)))


def _algorithm(turn: int, dtype: Dtype) -> str:
    """Return the algorithm in turn; GRPO in bfloat16, whose noise exceeds ESPO's clip ranges."""
    return "grpo" if dtype == "bfloat16" else list(ALGORITHMS)[turn % 2]
