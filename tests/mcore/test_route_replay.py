"""Routes of several model chunks, and the end of a pass, with routers alone instead of models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.mcore.replay import RouteReplay

TOPK = 2
SCORES = torch.tensor([[9.0, 1.0, 5.0, 7.0], [2.0, 8.0, 4.0, 6.0]])
LIVE = SCORES.topk(TOPK, dim=1).indices


class Router(TopKRouter):
    """A router that replay can control, without weights. layer: counted from 0."""

    def __init__(self, layer: int, **changes: Any) -> None:
        torch.nn.Module.__init__(self)
        self.layer_number = layer + 1
        settings = {
            "recompute_modules": None,
            "recompute_granularity": None,
            "moe_router_enable_expert_bias": False,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_load_balancing_type": "none",
            "moe_router_fusion": False,
            "moe_expert_capacity_factor": None,
            "moe_aux_loss_coeff": 0.0,
            "moe_router_force_load_balancing": False,
        }
        self.config: Any = SimpleNamespace(**(settings | changes))

    def choose(self) -> torch.Tensor:
        """Return the experts of each row."""
        target: Any = self.router_replay

        def topk(scores: torch.Tensor, count: int, **_: Any) -> Any:
            return scores.topk(count, dim=1)

        return target.get_replay_topk(SCORES, TOPK, default_compute_topk=topk)[1]


def make_replay(*chunks: tuple[int, ...], source: Any = "rollout", **changes: Any) -> Any:
    """Return a replay over model chunks with these layers, and the routers of each chunk."""
    routers = [[Router(layer, **changes) for layer in layers] for layers in chunks]
    models = [torch.nn.ModuleList(chunk) for chunk in routers]
    return RouteReplay(models, source), routers


def test_each_chunk_replays_the_routes_of_its_own_layers() -> None:
    replay, chunks = make_replay((0, 1), (4, 5, 6))
    replay.require_layers((0, 1, 4, 5, 6))
    routes = torch.randint(0, 4, (2, 5, TOPK), dtype=torch.uint8)
    with replay.active(forward_only=True):
        for index, (routers, first) in enumerate(zip(chunks, (0, 2), strict=True)):
            with replay.forward(index, 0, routes):
                for layer, router in enumerate(routers, first):
                    assert router.choose().equal(routes[:, layer].long())
    assert replay.take_faults() == ""


def test_routers_are_in_the_order_of_their_layers() -> None:
    replay, _ = make_replay((2, 0, 1))
    replay.require_layers((0, 1, 2))


def test_routers_choose_freely_after_a_pass_that_raised() -> None:
    replay, [[router]] = make_replay((0,))
    with pytest.raises(ZeroDivisionError), replay.active():
        _ = 1 / 0
    assert router.choose().equal(LIVE)
    assert not replay.has_faults


@pytest.mark.parametrize(("source", "routing"), [("rollout", "replay"), ("trainer", "record")])
def test_the_old_policy_pass_records_what_the_trainer_replays(source: str, routing: str) -> None:
    replay, _ = make_replay((0,), source=source)
    assert replay.old_policy_routing == routing


def test_recorded_routes_can_be_taken_once() -> None:
    replay, [[router]] = make_replay((3,), source="trainer")
    with replay.active("record", forward_only=True), replay.forward(0, 0, None):
        router.choose()
    (routes,) = replay.take_recorded_routes(1)
    assert routes[:, 0].equal(LIVE.to(torch.uint8))
    assert replay.take_faults() == ""
    assert replay.take_recorded_routes(1) == [None]
    assert "layer 3, micro-batch 0: its router recorded nothing" in replay.take_faults()


@pytest.mark.parametrize(
    ("granularity", "modules", "recomputations"),
    [
        (None, None, 0),
        ("full", None, 1),
        ("selective", ["moe"], 1),
        ("selective", ["core_attn"], 0),
    ],
)
def test_the_recomputations_of_a_router_follow_from_the_recomputed_modules(
    granularity: str | None, modules: list[str] | None, recomputations: int
) -> None:
    replay, [[router]] = make_replay(
        (0,), recompute_granularity=granularity, recompute_modules=modules
    )
    with replay.active():
        with replay.forward(0, 0, torch.zeros(2, 1, TOPK, dtype=torch.uint8)), torch.no_grad():
            router.choose()
        for _ in range(recomputations):
            assert router.choose().equal(torch.zeros(2, TOPK, dtype=torch.int64))
    assert replay.take_faults() == ""
