"""The layouts that must compute what one rank computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.schema import ParallelSettings


@dataclass(frozen=True)
class LayoutCase:
    """A layout of two ranks.

    nan_rank: the rank that gets a NaN among its gradients; None if none does.
    """

    parallel: ParallelSettings
    recompute: Literal["none", "full"] = "none"
    nan_rank: int | None = None


EP2 = ParallelSettings(ep=2, timeout_s=60)
PP2_VPP2 = ParallelSettings(pp=2, vpp=2, timeout_s=60)
PARITY = {
    "dp2": LayoutCase(ParallelSettings(timeout_s=60)),
    "ep2": LayoutCase(EP2),
    "ep2 recompute": LayoutCase(EP2, recompute="full"),
    "tp2 sequence-parallel ep2": LayoutCase(ParallelSettings(tp=2, ep=2, timeout_s=60)),
    "pp2": LayoutCase(ParallelSettings(pp=2, timeout_s=60)),
    "pp2 vpp2": LayoutCase(PP2_VPP2),
    "pp2 vpp2 recompute": LayoutCase(PP2_VPP2, recompute="full"),
}
NAN_GRADIENT = {f"nan on rank {rank}": LayoutCase(EP2, nan_rank=rank) for rank in (0, 1)}
