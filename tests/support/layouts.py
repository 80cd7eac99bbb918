"""The layouts whose whole steps are compared with float64 ones; the launcher refuses every kind that is not here."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rl.config.schema import EspoSettings, GrpoSettings, OptimizerSettings, ParallelSettings

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

MODELS: dict[str, dict[str, bool]] = {"plain": {}, "tied": {"norm_topk_prob": False, "tie_word_embeddings": True}}
ALGORITHMS = {"grpo": GrpoSettings(clip_low=0.03, clip_high=0.05), "espo": EspoSettings(alpha=0.02, min_clip=3e-3)}
OPTIMIZER = OptimizerSettings(
    lr=1e-3, warmup_steps=2, decay="linear", min_lr_ratio=0.1, beta2=0.9, eps=1e-5, weight_decay=0.1, clip_grad=0.5
)
TOTAL_STEPS, TEMPERATURE = 6, 0.8
BATCHES, BATCH, STEPS_PER_BATCH = 2, 24, 2


class Kind(NamedTuple):
    """What a layout is apart from its sizes; data parallelism is free. etp: over which an expert is split."""

    tp: bool
    ep: bool
    etp: Literal["1", "tp", "other"]
    recompute: str


@dataclass(frozen=True)
class Layout:
    """One layout on `ranks` processes."""

    ranks: int
    parallel: ParallelSettings
    recompute: Recompute = "none"

    @property
    def kind(self) -> Kind:
        return kind_of(self.parallel, self.recompute)


def kind_of(parallel: ParallelSettings, recompute: str) -> Kind:
    etp = parallel.etp or parallel.default_etp
    split: Literal["1", "tp", "other"] = "tp" if etp == parallel.tp > 1 else "1" if etp == 1 else "other"
    return Kind(parallel.tp > 1, parallel.ep > 1, split, recompute)


def grid(tp: int = 1, ep: int = 1, etp: int | None = None) -> ParallelSettings:
    return ParallelSettings(tp=tp, ep=ep, etp=etp, sequence_parallel=tp > 1, timeout_s=200)


def _layouts(ranks: int, **grids: ParallelSettings) -> dict[str, Layout]:
    """Each grid with every recomputation."""
    return {
        f"{name}-{recompute}": Layout(ranks, parallel, recompute)
        for name, parallel in grids.items()
        for recompute in RECOMPUTE
    }


LAYOUTS: dict[str, Layout] = {
    **_layouts(1, one=grid()),
    "dp2-none": Layout(2, grid()),
    **_layouts(2, ep2=grid(ep=2), tp2=grid(tp=2), tp2_ep2=grid(tp=2, ep=2)),
    **_layouts(4, tp2_ep2_etp2=grid(tp=2, ep=2, etp=2)),
    "ep4-none": Layout(4, grid(ep=4)),
    "dp2_ep2-none": Layout(4, grid(ep=2)),
    "tp2_dp2-none": Layout(4, grid(tp=2)),
    "tp2_ep2_dp2-none": Layout(4, grid(tp=2, ep=2)),
    "tp4_ep2-none": Layout(4, grid(tp=4, ep=2)),
}


@dataclass(frozen=True)
class Case:
    """One run: a layout, an algorithm and a model of `MODELS`."""

    layout: str
    algorithm: str
    model: str = "plain"

    def __str__(self) -> str:
        return f"{self.layout}:{self.algorithm}:{self.model}"

    @classmethod
    def named(cls, name: str) -> "Case":
        return cls(*name.split(":"))


def cases_of(ranks: int) -> list[Case]:
    """Every layout of so many ranks, the algorithms in turn; one of one rank and one of two with everything else."""
    names = [name for name, layout in LAYOUTS.items() if layout.ranks == ranks]
    cases = {Case(name, list(ALGORITHMS)[turn % 2]) for turn, name in enumerate(names)}
    for name in {"one-none", "tp2_ep2-none"} & set(names):
        cases |= {Case(name, "grpo", "tied"), *(Case(name, algorithm) for algorithm in ALGORITHMS)}
    return sorted(cases, key=lambda case: (names.index(case.layout), str(case)))
