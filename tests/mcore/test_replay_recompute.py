"""Replay where `model.recompute_modules` names modules that run again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore.replayed_models import (
    MICRO_BATCHES,
    build,
    record_routing_maps,
    routing_map,
    train_pass,
)
from tests.support.packed_sequences import pack
from tests.support.tiny_families import deepseek_v3, randomize_weights

# model.recompute_modules, endings of the names of modules that run twice, runs of a router
MODULES = [
    (["core_attn"], ("core_attention",), 1),
    (["mlp"], ("layers.1.mlp",), 1),
    (["moe"], ("router",), 2),
    (["moe", "mlp", "core_attn"], ("router", "layers.1.mlp", "core_attention"), 2),
]


@pytest.fixture(scope="module")
def gradients_without_recomputation(megatron: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    return train_pass(*build(checkpoint))


@pytest.fixture(scope="module")
def shared_experts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have shared experts, behind a dense layer."""
    path = tmp_path_factory.mktemp("shared") / "checkpoint"
    randomize_weights(deepseek_v3(n_group=1, num_experts_per_tok=2)).save_pretrained(path)
    return path


def record_module_calls(models: list[Any], endings: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield a list for each module with such a name, which collects all later calls."""
    for name, module in models[0].named_modules():
        if name.endswith(endings):
            calls: list[str] = []
            module.register_forward_hook(lambda *_, calls=calls, name=name: calls.append(name))
            yield calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "endings", "router_runs"), MODULES, ids=["+".join(case[0]) for case in MODULES]
)
def test_recomputed_modules_use_the_same_routes_and_gradients_match(
    megatron: Any,
    checkpoint: Path,
    gradients_without_recomputation: dict[str, torch.Tensor],
    modules: list[str],
    endings: tuple[str, ...],
    router_runs: int,
) -> None:
    gradients = check_runs(checkpoint, modules, endings, router_runs=router_runs)
    check_gradients(gradients, gradients_without_recomputation)


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules", [["shared_experts"], ["moe", "shared_experts"]], ids=["alone", "within moe"]
)
def test_shared_experts_are_recomputed_beside_replayed_experts(
    megatron: Any, shared_experts_checkpoint: Path, modules: list[str]
) -> None:
    # Within `moe` they run a third time: once without a graph in the second run of the layer.
    is_nested = "moe" in modules
    gradients = check_runs(
        shared_experts_checkpoint,
        modules,
        ("shared_experts",),
        router_runs=1 + is_nested,
        module_runs=2 + is_nested,
    )
    check_gradients(gradients, train_pass(*build(shared_experts_checkpoint)))


def check_runs(
    checkpoint: Path,
    modules: list[str],
    endings: tuple[str, ...],
    *,
    router_runs: int,
    module_runs: int = 2,
) -> dict[str, torch.Tensor]:
    """Check how often routers and modules run for a micro-batch, and return the gradients.

    endings: of the names of modules that run `module_runs` times.
    """
    models, replay = build(checkpoint, "selective", modules=modules)
    maps_by_router = record_routing_maps(models)
    module_calls = list(record_module_calls(models, endings))
    gradients = train_pass(models, replay)
    assert replay.take_faults() == ""
    for layer, maps in enumerate(maps_by_router):
        expected_maps = [
            routing_map(pack(sequences, range(3)).routes[:, layer])
            for sequences in MICRO_BATCHES
            for _ in range(router_runs)
        ]
        assert len(maps) == len(expected_maps)
        assert all(torch.equal(a, b) for a, b in zip(maps, expected_maps, strict=True))
    assert module_calls
    assert {len(calls) for calls in module_calls} == {module_runs * len(MICRO_BATCHES)}
    return gradients


def check_gradients(
    gradients: dict[str, torch.Tensor], expected_gradients: dict[str, torch.Tensor]
) -> None:
    assert all(
        gradient.norm() > 0
        for name, gradient in gradients.items()
        if name.endswith("router.weight")
    )
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_missing_recomputation_of_a_router_is_a_fault(megatron: Any, checkpoint: Path) -> None:
    models, replay = build(checkpoint, "selective", modules=["moe"])
    for module in models[0].modules():
        if hasattr(module, "moe_layer_recompute"):
            module.moe_layer_recompute = False
    train_pass(models, replay)
    faults = replay.take_faults()
    assert "layer 0, micro-batch 0: its router was recomputed 0 times, not 1" in faults
