"""Megatron's model of every family computes what transformers computes, and keeps every bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.models.families import FAMILIES as SUPPORTED_FAMILIES
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from tests.support.packed_sequences import pack, routes_of, sequence, targets_of
from tests.support.tiny_families import FAMILIES, force_routes, gates, randomize_weights

INDICES = tuple(range(12))


@dataclass(frozen=True)
class TinyModel:
    """A transformers model, its checkpoint and its shape."""

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
        """Pack sequences with random routes; without experts there are none."""
        routes = self.routes(indices) if self.shape.moe_layers else None
        return replace(pack(indices), routes=routes)

    def routes(self, indices: tuple[int, ...]) -> torch.Tensor:
        shape = self.shape
        return torch.cat(
            [routes_of(i, len(shape.moe_layers), shape.num_experts, shape.topk) for i in indices]
        )


@pytest.fixture(scope="module", params=list(FAMILIES))
def tiny(request: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    hf = randomize_weights(FAMILIES[request.param]())
    checkpoint = tmp_path_factory.mktemp("family") / "checkpoint"
    hf.save_pretrained(checkpoint)
    return TinyModel(hf, checkpoint, read_shape(checkpoint))


@pytest.fixture(scope="module")
def exact_gradients(
    tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    return hf_gradients(tiny, tmp_path_factory.mktemp("gradients"))


def gradient_cases() -> list[Any]:
    """Every family with every recomputation. Each family has one of them in daily tests."""
    quick = {"qwen3_moe": "none", "mixtral": "selective", "deepseek_v3": "full"}
    slow = {
        "qwen3": "full",
        "deepseek_v3 whole queries, one group": "selective",
        "deepseek_v3 YaRN": "none",
    }
    cases = []
    for family in FAMILIES:
        for recompute in ("none", "selective", "full"):
            marks = [pytest.mark.nightly]
            if quick.get(family) == recompute:
                marks = []
            elif slow.get(family) == recompute:
                marks = [pytest.mark.slow]
            cases.append(pytest.param(family, recompute, marks=marks))
    return cases


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
    tiny: TinyModel, routes: Callable[[tuple[int, ...]], torch.Tensor] | None = None
) -> torch.Tensor:
    rows = []
    for index in INDICES:
        force_routes(tiny.hf, None if routes is None else routes((index,)))
        rows.append(tiny.hf(input_ids=sequence(index)[None]).logits[0])
    force_routes(tiny.hf, None)
    return torch.cat(rows)


@pytest.mark.slow
def test_every_supported_family_has_a_tiny_model() -> None:
    assert {type(make()).__name__ for make in FAMILIES.values()} == set(SUPPORTED_FAMILIES)


@pytest.mark.slow
def test_packed_logits_match_transformers(megatron: Any, tiny: TinyModel) -> None:
    with torch.no_grad():
        expected_logits = hf_logits(tiny)
    logits = logits_of(tiny.megatron(), pack(INDICES))
    error = float((logits - expected_logits).abs().max())
    print(f"largest error of {logits.numel()} logits: {error:.1e}")
    assert expected_logits.abs().max() > 1
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_replayed_logits_match_transformers_with_the_same_experts(
    megatron: Any, tiny: TinyModel
) -> None:
    from megatron_rl.mcore.replay import RouteReplay

    if not tiny.shape.moe_layers:
        pytest.skip("this family has no experts")
    with torch.no_grad():
        replayed_logits = hf_logits(tiny, tiny.routes)
        live_logits = hf_logits(tiny)
    models = tiny.megatron()
    logits = logits_of(models, tiny.batch(INDICES), RouteReplay(models))
    error = float((logits - replayed_logits).abs().max())
    print(f"largest error of {logits.numel()} logits: {error:.1e}")
    assert (replayed_logits - live_logits).abs().max() > 0.1
    torch.testing.assert_close(logits, replayed_logits, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("tiny", "recompute"), gradient_cases(), indirect=["tiny"])
def test_gradients_match_transformers_in_float64(
    megatron: Any, tiny: TinyModel, exact_gradients: dict[str, torch.Tensor], recompute: str
) -> None:
    """Both use the same routes. Gradients are compared by Hugging Face name."""
    gradients = megatron_gradients(tiny, recompute)
    assert gradients.keys() == exact_gradients.keys()
    errors = {
        name: float((gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in exact_gradients.items()
        if gradient.norm() > 0
    }
    largest = max(errors, key=lambda name: errors[name])
    print(f"largest error of {len(errors)} gradients: {largest} {errors[largest]:.1e}")
    zero_names = exact_gradients.keys() - errors.keys()
    assert all(float(gradients[name].norm()) == 0 for name in zero_names)
    assert len(zero_names) <= len(gates(tiny.hf)), "only routers' biases have no gradient"
    assert errors[largest] < 1e-5


def hf_gradients(tiny: TinyModel, directory: Path) -> dict[str, torch.Tensor]:
    """Return float64 gradients under the names of transformers' checkpoints."""
    model = type(tiny.hf)(tiny.hf.config).double().eval()
    model.load_state_dict(tiny.hf.state_dict())
    if tiny.shape.moe_layers:
        model.set_experts_implementation("eager")  # grouped kernels take no float64
    for index in INDICES:
        if tiny.shape.moe_layers:
            force_routes(model, tiny.routes((index,)))
        logits = model(input_ids=sequence(index)[None]).logits[0]
        torch.nn.functional.cross_entropy(logits, targets_of((index,)), reduction="sum").backward()
    force_routes(model, None)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def megatron_gradients(tiny: TinyModel, recompute: str) -> dict[str, torch.Tensor]:
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


def test_parameter_count_matches_the_model(megatron: Any, tiny: TinyModel) -> None:
    from megatron_rl.models.parameter_count import num_parameters
    from megatron_rl.planning.memory import rank_parameters

    sizes = {name: weight.numel() for name, weight in tiny.megatron()[0].named_parameters()}
    assert num_parameters(tiny.shape) == sum(sizes.values())
    parameters = rank_parameters(tiny.shape, ParallelSettings(), 0)
    expert_sizes = [size for name, size in sizes.items() if ".experts." in name]
    assert parameters.experts == sum(expert_sizes)
    assert parameters.total == sum(sizes.values())


@pytest.mark.slow
def test_repeated_load_and_export_is_bit_exact(
    megatron: Any, tiny: TinyModel, tmp_path: Path
) -> None:
    from megatron_rl.mcore.weights import save_hf_weights

    original = load_file(tiny.checkpoint / "model.safetensors")
    first = tmp_path / "first"
    second = tmp_path / "second"
    save_hf_weights(
        tiny.megatron(), tiny.shape, source=tiny.checkpoint, target=first, dtype=torch.float32
    )
    reloaded_model = replace(tiny, checkpoint=first)
    save_hf_weights(
        reloaded_model.megatron(), tiny.shape, source=first, target=second, dtype=torch.float32
    )
    for directory in (first, second):
        export = load_file(directory / "model.safetensors")
        assert export.keys() == original.keys()
        assert all(torch.equal(export[name], original[name]) for name in original)
    hf_state = type(tiny.hf).from_pretrained(second).state_dict()
    assert all(torch.equal(hf_state[name], weight) for name, weight in tiny.hf.state_dict().items())


def test_bfloat16_model_keeps_expert_biases_in_float32(megatron: Any, tiny: TinyModel) -> None:
    """A bias rounded to bfloat16 would choose other experts than the engine's."""
    from megatron_rl.mcore.weights import iterate_hf_weights

    original = load_file(tiny.checkpoint / "model.safetensors")
    models = tiny.megatron(dtype="bfloat16")
    export = dict(iterate_hf_weights(models, tiny.shape, torch.bfloat16))
    float32_names = {name for name, tensor in export.items() if tensor.dtype is torch.float32}
    assert float32_names == {name for name in original if name.endswith("e_score_correction_bias")}
    for name, tensor in export.items():
        assert torch.equal(tensor, original[name].to(tensor.dtype)), name


def test_moving_expert_bias_is_refused(megatron: Any, tiny: TinyModel) -> None:
    from megatron_rl.mcore.replay import RouteReplay

    if not tiny.shape.router.bias:
        pytest.skip("this family's routers have no bias")
    models = tiny.megatron()
    models[0].config.moe_router_bias_update_rate = 1e-3
    with pytest.raises(Failure, match="moe_router_bias_update_rate"):
        RouteReplay(models)
