"""Replay where chosen modules run again in the backward pass: each router as often as the modules
say, no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.testbed.packed_sequences import pack
from launch.testbed.tiny_families import deepseek_v3, randomized
from tests.mcore.replayed_models import MICRO_BATCHES, build, chosen, train_pass

# model.recompute_modules | how the names of modules end that run again | how often a router runs
MODULES = [
    (["core_attn"], ("core_attention",), 1),
    (["mlp"], ("layers.1.mlp",), 1),
    (["moe"], ("router",), 2),
    (["moe", "mlp", "core_attn"], ("router", "layers.1.mlp", "core_attention"), 2),
]


@pytest.fixture(scope="module")
def plain(megatron: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    return train_pass(*build(checkpoint))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with shared experts behind a dense one."""
    path = tmp_path_factory.mktemp("shared") / "checkpoint"
    randomized(deepseek_v3(n_group=1, num_experts_per_tok=2)).save_pretrained(path)
    return path


def calls_of(models: list[Any], names: tuple[str, ...]) -> Iterator[list[str]]:
    """What every call of such a module from now on is written to."""
    for full, module in models[0].named_modules():
        if full.endswith(names):
            calls: list[str] = []
            module.register_forward_hook(lambda *_, calls=calls, full=full: calls.append(full))
            yield calls


@pytest.mark.parametrize(
    ("modules", "again", "runs"), MODULES, ids=["+".join(case[0]) for case in MODULES]
)
def test_what_is_recomputed_uses_the_routes_again_and_gives_the_same_gradients(
    megatron: Any,
    checkpoint: Path,
    plain: dict[str, torch.Tensor],
    modules: list[str],
    again: tuple[str, ...],
    runs: int,
) -> None:
    assert_recomputed(checkpoint, plain, modules, again, runs)


@pytest.mark.parametrize(
    "modules", [["shared_experts"], ["moe", "shared_experts"]], ids=["alone", "within moe"]
)
def test_shared_experts_are_recomputed_beside_replayed_ones(
    megatron: Any, shared: Path, modules: list[str]
) -> None:
    plain = train_pass(*build(shared))
    nested = (
        "moe" in modules
    )  # they run without a graph, within the layer's second run without one, and with one
    assert_recomputed(shared, plain, modules, ("shared_experts",), 1 + nested, each=2 + nested)


def assert_recomputed(
    checkpoint: Path,
    plain: dict[str, torch.Tensor],
    modules: list[str],
    again: tuple[str, ...],
    runs: int,
    each: int = 2,
) -> None:
    """Modules whose names end with `again` run `each` times for a micro-batch, routers `runs`
    times.
    """
    models, replay = build(checkpoint, "selective", modules=modules)
    seen, recomputed = chosen(models), list(calls_of(models, again))
    gradients = train_pass(models, replay)
    assert replay.take_faults() == ""
    for layer, maps in enumerate(seen):
        routes = [
            pack(m, range(3)).routes[:, layer].long() for m in MICRO_BATCHES for _ in range(runs)
        ]
        assert len(maps) == len(routes)
        for got, wanted in zip(maps, routes, strict=True):
            assert torch.equal(
                got, torch.zeros(len(wanted), 8, dtype=torch.bool).scatter(1, wanted, True)
            )
    assert recomputed and {len(calls) for calls in recomputed} == {each * len(MICRO_BATCHES)}
    assert all(
        gradient.norm() > 0
        for name, gradient in gradients.items()
        if name.endswith("router.weight")
    )
    for name, gradient in plain.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_router_that_does_not_run_again_as_told_is_a_fault(
    megatron: Any, checkpoint: Path
) -> None:
    models, replay = build(checkpoint, "selective", modules=["moe"])
    for module in models[0].modules():
        if hasattr(module, "moe_layer_recompute"):
            module.moe_layer_recompute = False
    train_pass(models, replay)
    assert (
        "layer 0, micro-batch 0: its router was recomputed 0 times, not 1" in replay.take_faults()
    )
