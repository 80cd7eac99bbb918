"""Every family: Megatron's model computes what transformers' does, forward and backward, and keeps
every bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from launch.testbed.packed_sequences import pack, routes_of, sequence, targets_of
from launch.testbed.tiny_families import FAMILIES, force, gates, randomized
from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.models.families import FAMILIES as KNOWN
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape

INDICES = tuple(range(12))


class Tiny(NamedTuple):
    hf: Any
    checkpoint: Path
    shape: ModelShape

    def megatron(self, **settings: Any) -> list[Any]:
        from megatron_rl.mcore.model import build_models
        from megatron_rl.mcore.weights import load_hf_weights

        models = build_models(
            self.shape, ModelSettings(path=str(self.checkpoint), **settings), ParallelSettings()
        )
        load_hf_weights(models, self.shape, self.checkpoint)
        return models

    def batch(self, indices: tuple[int, ...]) -> Any:
        """A pack with random routes, None without experts."""
        batch, layers = pack(indices), len(self.shape.moe_layers)
        return replace(batch, routes=self.routes(indices) if layers else None)

    def routes(self, indices: tuple[int, ...]) -> torch.Tensor:
        shape = self.shape
        return torch.cat(
            [routes_of(i, len(shape.moe_layers), shape.num_experts, shape.topk) for i in indices]
        )


@pytest.fixture(scope="module", params=list(FAMILIES))
def tiny(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    hf = randomized(FAMILIES[request.param]())
    checkpoint = tmp_path_factory.mktemp("family") / "checkpoint"
    hf.save_pretrained(checkpoint)
    return Tiny(hf, checkpoint, read_shape(checkpoint))


@pytest.fixture(scope="module")
def exact_gradients(
    tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    return hf_gradients(tiny, tmp_path_factory.mktemp("gradients"))


def logits_of(models: list[Any], batch: Any, replay: Any = None) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if replay is not None:
            stack.enter_context(replay.active(forward_only=True))
            stack.enter_context(replay.forward(0, 0, batch.routes))
        return models[0](
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed_seq_params(),
        )[0]


def hf_logits(
    tiny: Tiny, routes: Callable[[tuple[int, ...]], torch.Tensor] | None = None
) -> torch.Tensor:
    rows = []
    for index in INDICES:
        force(tiny.hf, None if routes is None else routes((index,)))
        rows.append(tiny.hf(input_ids=sequence(index)[None]).logits[0])
    force(tiny.hf, None)
    return torch.cat(rows)


def test_every_family_is_here() -> None:
    assert {
        architecture for make in FAMILIES.values() for architecture in [type(make()).__name__]
    } == set(KNOWN)


def test_packed_logits_are_those_of_transformers(megatron: Any, tiny: Tiny) -> None:
    with torch.no_grad():
        expected = hf_logits(tiny)
    actual = logits_of(tiny.megatron(), pack(INDICES))
    print(f"worst of {expected.numel()} logits: {(actual - expected).abs().max():.1e}")
    assert expected.abs().max() > 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def test_replayed_logits_are_those_of_transformers_with_the_same_experts(
    megatron: Any, tiny: Tiny
) -> None:
    from megatron_rl.mcore.replay import RouteReplay

    if not tiny.shape.moe_layers:
        pytest.skip("nothing is routed")
    with torch.no_grad():
        expected, live = hf_logits(tiny, tiny.routes), hf_logits(tiny)
    models = tiny.megatron()
    actual = logits_of(models, tiny.batch(INDICES), RouteReplay(models))
    print(f"worst of {expected.numel()} logits: {(actual - expected).abs().max():.1e}")
    assert (expected - live).abs().max() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_those_of_transformers_in_float64(
    megatron: Any, tiny: Tiny, exact_gradients: dict[str, torch.Tensor], recompute: str
) -> None:
    """With the same forced experts; every weight's gradient, under its Hugging Face name."""
    expected = exact_gradients
    actual = megatron_gradients(tiny, recompute)
    assert actual.keys() == expected.keys()
    errors = {
        name: float((actual[name] - g).norm() / g.norm())
        for name, g in expected.items()
        if g.norm() > 0
    }
    worst = max(errors, key=lambda name: errors[name])
    print(f"worst of {len(errors)} gradients: {worst} {errors[worst]:.1e}")
    assert all(float(actual[name].norm()) == 0 for name in expected.keys() - errors.keys())
    assert len(errors) >= len(expected) - len(gates(tiny.hf)), (
        "all but the routers' biases move the loss"
    )
    assert errors[worst] < 1e-5


def hf_gradients(tiny: Tiny, directory: Path) -> dict[str, torch.Tensor]:
    """float64, as transformers would save them: fused experts come apart under their checkpoint
    names.
    """
    model = type(tiny.hf)(tiny.hf.config).double().eval()
    model.load_state_dict(tiny.hf.state_dict())
    if tiny.shape.moe_layers:
        model.set_experts_implementation("eager")  # grouped kernels take no float64
    for index in INDICES:
        if tiny.shape.moe_layers:
            force(model, tiny.routes((index,)))
        logits = model(input_ids=sequence(index)[None]).logits[0]
        torch.nn.functional.cross_entropy(logits, targets_of((index,)), reduction="sum").backward()
    force(model, None)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def megatron_gradients(tiny: Tiny, recompute: str) -> dict[str, torch.Tensor]:
    from megatron_rl.mcore.optimizer import wrap_data_parallel
    from megatron_rl.mcore.replay import RouteReplay
    from megatron_rl.mcore.schedule import run_schedule
    from megatron_rl.mcore.weights import iterate_hf_weights

    models = wrap_data_parallel(tiny.megatron(recompute=recompute))
    micro_batches = [INDICES[:5], INDICES[5:]]

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        targets = targets_of(micro_batches[index])
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), None

    models[0].zero_grad_buffer()
    batches = [tiny.batch(indices) for indices in micro_batches]
    replay = RouteReplay(models) if tiny.shape.moe_layers else None
    run_schedule(models, batches, loss, forward_only=False, replay=replay)
    before = {
        name: buffer.clone() for name, buffer in models[0].named_buffers() if "expert_bias" in name
    }
    with torch.no_grad():
        for weight in models[0].parameters():
            weight.copy_(weight.main_grad)
        for name, buffer in models[0].named_buffers():
            if "expert_bias" in name:
                assert torch.equal(buffer, before[name])
                buffer.zero_()
    return {name: tensor.double() for name, tensor in iterate_hf_weights(models, tiny.shape)}


def test_every_parameter_is_counted(megatron: Any, tiny: Tiny) -> None:
    from megatron_rl.models.parameter_count import num_parameters
    from megatron_rl.planning.memory import rank_parameters

    held, experts = (
        {name: weight.numel() for name, weight in tiny.megatron()[0].named_parameters()},
        ".experts.",
    )
    assert num_parameters(tiny.shape) == sum(held.values())
    counted = rank_parameters(tiny.shape, ParallelSettings(), 0)
    assert counted.experts == sum(count for name, count in held.items() if experts in name)
    assert counted.total == sum(held.values())


def test_load_then_export_then_load_is_bit_exact(megatron: Any, tiny: Tiny, tmp_path: Path) -> None:
    from megatron_rl.mcore.weights import save_hf_weights

    original = load_file(tiny.checkpoint / "model.safetensors")
    first, again = tmp_path / "first", tmp_path / "again"
    save_hf_weights(
        tiny.megatron(), tiny.shape, source=tiny.checkpoint, target=first, dtype=torch.float32
    )
    once = tiny._replace(checkpoint=first)
    save_hf_weights(once.megatron(), tiny.shape, source=first, target=again, dtype=torch.float32)
    for saved in (first, again):
        exported = load_file(saved / "model.safetensors")
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], original[name]) for name in original)
    loaded = type(tiny.hf).from_pretrained(again).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in tiny.hf.state_dict().items())


def test_a_bfloat16_model_keeps_the_routers_biases_whole(megatron: Any, tiny: Tiny) -> None:
    """Rounded to bfloat16, other experts would be chosen than the engine's."""
    from megatron_rl.mcore.weights import iterate_hf_weights

    original = load_file(tiny.checkpoint / "model.safetensors")
    models = tiny.megatron(dtype="bfloat16")
    exported = dict(iterate_hf_weights(models, tiny.shape, torch.bfloat16))
    assert {name for name, tensor in exported.items() if tensor.dtype is torch.float32} == {
        name for name in original if name.endswith("e_score_correction_bias")
    }
    for name, tensor in exported.items():
        assert torch.equal(tensor, original[name].to(tensor.dtype)), name


def test_a_bias_that_would_move_is_refused(megatron: Any, tiny: Tiny) -> None:
    from megatron_rl.mcore.replay import RouteReplay
    from megatron_rl.mcore.router_target import ReplayError

    if not tiny.shape.router.bias:
        pytest.skip("this family's routers have no bias")
    models = tiny.megatron()
    models[0].config.moe_router_bias_update_rate = 1e-3
    with pytest.raises(ReplayError, match="moe_router_bias_update_rate"):
        RouteReplay(models)
