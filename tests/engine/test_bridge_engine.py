"""The bridge against one real engine: keys, routes, versions, weight updates and their audit."""

import asyncio
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang_bridge.admin import AdminClient
from sglang_bridge.client import GenerateClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError, RequestFailed, WeightMismatch, WeightUpdateFailed
from sglang_bridge.generation import FinishReason, Generation
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.server.readiness import require_external_engines
from sglang_bridge.settings import ServerSettings
from sglang_bridge.weights.audit import audit_engine
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.crew import SendReport
from sglang_bridge.weights.disk import DiskTransport
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.expectation import WeightExpectation
from tests.lab.throughput_ladder.engines import force_lengths
from tests.sglang_bridge.tiny_model import EXPERTS, LAYERS, TOP_K, write_tiny_model
from tests.support.engines import flush_idle_cache, running_engine
from tests.support.updaters import SoleUpdater, in_units

pytestmark = pytest.mark.engine

Weights = dict[str, torch.Tensor]
Push = Callable[[Iterator[tuple[str, torch.Tensor]], int], None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_tiny_model(root / "a", seed=0), write_tiny_model(root / "b", seed=1)


@pytest.fixture(scope="module")
def weights(models: tuple[Path, Path]) -> tuple[Weights, Weights]:
    first, second = (in_units(load_file(model / "model.safetensors")) for model in models)
    return first, second


@pytest.fixture(scope="module")
def engine(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedEngine]:
    with running_engine(
        models[0], tmp_path_factory.mktemp("logs"), max_running_requests=32
    ) as running:
        yield running


@pytest.fixture
def push(engine: ManagedEngine) -> Iterator[Push]:
    """Sends weights to the engine under a version."""
    transport = DistributedTransport(backend="gloo", timeout_seconds=60)
    updater = SoleUpdater(transport, bucket_bytes=256 * 1024)
    yield partial(updater.push, admins=[engine.admin()])
    updater.close()


def sampling(tokens: int, temperature: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(
        max_new_tokens=tokens, temperature=temperature, stop_token_ids=(), top_p=1.0
    )


def client_of(engine: ManagedEngine) -> GenerateClient:
    return GenerateClient(
        engine.url,
        api_key=engine.keys.api_key,
        deadline_seconds=120,
        route_shape=(LAYERS, TOP_K),
    )


def sample(
    engine: ManagedEngine, prompts: Sequence[Sequence[int]], tokens: int
) -> list[Generation]:
    async def sample_all() -> list[Generation]:
        async with client_of(engine) as client:
            requests = [
                client.generate(ids, sampling(tokens), rid=f"s{i}") for i, ids in enumerate(prompts)
            ]
            return list(await asyncio.gather(*requests))

    return asyncio.run(sample_all())


def test_external_server_is_checked(engine: ManagedEngine) -> None:
    def check(keys: RunKeys = engine.keys, *, dtype: str = "float32") -> None:
        settings = ServerSettings(dtype=dtype, start_timeout_s=5.0)  # type: ignore[arg-type]
        require_external_engines([Engine(url=engine.url)], keys, settings, return_routes=True)

    check()
    with pytest.raises(EngineError, match=r"engine\.key_file"):
        check(create_keys())
    with pytest.raises(EngineError, match=r"engine\.dtype=bfloat16"):
        check(dtype="bfloat16")


def test_responses_have_logprobs_routes_and_a_version(engine: ManagedEngine) -> None:
    prompts = [[5, 6, 7, 8], list(range(20, 40)), [9]]
    for prompt, generation in zip(prompts, sample(engine, prompts, 12), strict=True):
        response = len(generation.output_ids)
        assert 1 <= response <= 12
        assert (generation.finish_reason == "stop") == (
            generation.output_ids[-1] == 2 and response <= 12
        )
        assert generation.logprobs.shape == (response,) and (generation.logprobs <= 0).all()
        assert generation.routes is not None
        assert generation.routes.shape == (len(prompt) + response - 1, LAYERS, TOP_K)
        assert generation.routes.min() >= 0 and generation.routes.max() < EXPERTS
        assert (generation.routes[..., 0] != generation.routes[..., 1]).all()
        assert len(generation.weight_versions) == 1


def test_cached_prefixes_still_have_their_routes(engine: ManagedEngine) -> None:
    prompt = list(range(50, 90))
    first, second = (sample(engine, [prompt], 4)[0] for _ in range(2))
    assert second.cached_tokens > 0
    assert first.routes is not None and second.routes is not None
    assert np.array_equal(first.routes[: len(prompt)], second.routes[: len(prompt)])


def test_keys_are_required_and_never_printed(engine: ManagedEngine) -> None:
    with pytest.raises(RequestFailed) as error_info:
        AdminClient(engine.engine, RunKeys(engine.keys.api_key, engine.keys.api_key)).pause()
    assert error_info.value.status == 401
    with pytest.raises(RequestFailed) as error_info:
        AdminClient(engine.engine, create_keys()).server_info()
    assert error_info.value.status == 401
    arguments = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert "launch_server" in arguments
    assert engine.keys.api_key not in arguments and engine.keys.admin_api_key not in arguments
    assert stat.S_IMODE(engine.log_path.stat().st_mode) == 0o600
    assert engine.keys.api_key in engine.log_path.read_text()
    assert engine.keys.api_key not in engine.log_tail(10_000)


def test_cancelled_request_is_aborted(engine: ManagedEngine) -> None:
    async def cancel_one() -> None:
        async with client_of(engine) as client:
            task = asyncio.create_task(
                client.generate([4, 5], sampling(1900, temperature=0.0), rid="long")
            )
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel_one())
    # The engine checks for closed connections every four seconds
    flush_idle_cache(engine.admin(), seconds=10.0)


def test_the_running_requests_of_a_group_end_with_the_group(engine: ManagedEngine) -> None:
    """SGLang aborts requests by their whole names alone."""

    async def abort(url: str, names: Sequence[str]) -> None:
        for name in names:
            await asyncio.to_thread(engine.admin().abort, name)

    async def scenario() -> list[Generation]:
        async with GenerateClient(engine.url, api_key=engine.keys.api_key, abort=abort) as client:
            with force_lengths():
                requests = [
                    asyncio.create_task(
                        client.generate([5, 6], sampling(2000), rid=rid, return_routes=False)
                    )
                    for rid in ("g-1/0", "g-1/1", "g-10/0")
                ]
                await asyncio.sleep(1.0)
            await client.abort("g-1/")
            aborted_generations = await asyncio.wait_for(asyncio.gather(*requests[:2]), 10)
            assert not requests[2].done()
            await client.abort("g-10/")
            return [*aborted_generations, await requests[2]]

    generations = asyncio.run(scenario())
    assert {generation.finish_reason for generation in generations} == {FinishReason.ABORT}
    assert all(0 < len(generation.output_ids) < 2000 for generation in generations)


def test_new_weights_arrive_and_responses_carry_their_version(
    engine: ManagedEngine, push: Push, weights: tuple[Weights, Weights]
) -> None:
    for version, content in ((11, weights[1]), (12, weights[0])):
        expectation = WeightExpectation(dtype=torch.float32, num_experts=EXPERTS)
        push(expectation.observe(iter(content.items())), version)
        report = audit_engine(engine.admin(), expectation)
        assert report.num_compared == 3 + 9 * LAYERS
        report.raise_on_mismatch(version)
        assert sample(engine, [[5, 6, 7]], 3)[0].weight_versions == (str(version),)


def test_start_weights_equal_the_checkpoint(
    engine: ManagedEngine, push: Push, weights: tuple[Weights, Weights]
) -> None:
    push(iter(weights[0].items()), 20)
    expectation = WeightExpectation(dtype=torch.float32, num_experts=EXPERTS)
    for name, tensor in weights[1].items():
        expectation.add(name, tensor)
    report = audit_engine(engine.admin(), expectation)
    norms = sum("norm" in name for name in weights[0])  # all ones in both models
    assert len(report.mismatches) == report.num_compared - norms


def test_engine_whose_trainer_died_during_an_update_is_usable(
    engine: ManagedEngine, push: Push, weights: tuple[Weights, Weights]
) -> None:
    engine.admin().pause()
    engine.admin().begin_weight_update()  # and no trainer ends it
    push(iter(weights[0].items()), 25)
    assert sample(engine, [[5, 6, 7]], 2)[0].weight_versions == ("25",)


def test_weight_unknown_to_the_engine_is_reported(
    engine: ManagedEngine, push: Push, weights: tuple[Weights, Weights]
) -> None:
    """The engine drops it silently and reports that the update succeeded."""
    expectation = WeightExpectation(dtype=torch.float32, num_experts=EXPERTS)
    unknown_weights = {**weights[0], "model.layers.0.self_attn.qq_norm.weight": torch.ones(4)}
    push(expectation.observe(iter(unknown_weights.items())), 26)
    with pytest.raises(
        WeightMismatch, match=r"qq_norm\.weight \(the engine has no such parameter\)"
    ):
        audit_engine(engine.admin(), expectation).raise_on_mismatch(26)


def test_an_engine_of_another_shape_names_the_tensor(
    engine: ManagedEngine, push: Push, weights: tuple[Weights, Weights]
) -> None:
    others = weights[0] | {"model.norm.weight": torch.ones(7)}
    with pytest.raises(WeightUpdateFailed, match=r"tensors, .* to model\.norm\.weight"):
        push(iter(others.items()), 27)
    push(iter(weights[0].items()), 28)
    assert sample(engine, [[5, 6, 7]], 2)[0].weight_versions == ("28",)


class FlippingTransport(DistributedTransport):
    """Flips one bit of one tensor on its way."""

    victim = ""

    def send(
        self, tensors: NamedTensors, admins: Sequence[AdminClient], version: int, **limits: Any
    ) -> SendReport:
        return super().send(self._flip(tensors), admins, version, **limits)

    def _flip(self, tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            if name == self.victim:
                tensor = tensor.clone()
                tensor.view(-1).view(torch.uint8)[17] ^= 1
            yield name, tensor


@pytest.mark.parametrize(
    "victim",
    [
        "lm_head.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.self_attn.k_proj.weight",
        "model.layers.3.mlp.experts.6.up_proj.weight",
    ],
)
def test_one_flipped_bit_is_reported(
    engine: ManagedEngine, weights: tuple[Weights, Weights], victim: str
) -> None:
    transport = FlippingTransport(backend="gloo", timeout_seconds=60)
    transport.victim = victim
    updater = SoleUpdater(transport, bucket_bytes=64 * 1024)
    admins = [engine.admin()]
    for version in (31, 32):
        expectation = WeightExpectation(dtype=torch.float32, num_experts=EXPERTS)
        updater.push(expectation.observe(iter(weights[1].items())), version, admins)
        report = audit_engine(engine.admin(), expectation)
        if version == 31:
            (mismatch,) = report.mismatches
            assert victim in mismatch.tensors
            with pytest.raises(WeightMismatch, match=victim.split(".experts")[0]):
                report.raise_on_mismatch(version)
            transport.victim = ""
    assert report.mismatches == ()
    updater.close()


def test_response_that_spans_an_update_has_two_versions(
    engine: ManagedEngine, push: Push, weights: tuple[Weights, Weights]
) -> None:
    """The response may have ended when the update comes. Then another one is sampled."""

    async def draw_across_an_update(version: int) -> Generation:
        async with client_of(engine) as client:
            task = asyncio.create_task(
                client.generate([4, 5, 6], sampling(400, temperature=0.0), rid="spanning")
            )
            # They arrive after it and are drawn in the same batches: with them it has tokens
            for n in range(3):
                await client.generate([9, 8, n + 10], sampling(4), rid=f"beside-{n}")
            await asyncio.to_thread(push, iter(weights[1].items()), version)
            return await task

    for version in (41, 43, 45, 47, 49):
        push(iter(weights[0].items()), version)
        generation = asyncio.run(draw_across_an_update(version + 1))
        if len(generation.weight_versions) > 1:
            break
    assert generation.weight_versions == (str(version), str(version + 1))
    assert generation.version_spans[0].end == generation.version_spans[1].start > 0
    assert generation.retractions == 1
    assert generation.routes is not None


def test_weights_are_loaded_from_disk(
    engine: ManagedEngine,
    models: tuple[Path, Path],
    weights: tuple[Weights, Weights],
    tmp_path: Path,
) -> None:
    transport = DiskTransport(directory=tmp_path, config_from=models[0], timeout_seconds=60)
    updater = SoleUpdater(transport, bucket_bytes=512 * 1024)
    admins = [engine.admin()]
    for version, content in ((51, weights[1]), (52, weights[0])):
        expectation = WeightExpectation(dtype=torch.float32, num_experts=EXPERTS)
        updater.push(expectation.observe(iter(content.items())), version, admins)
        audit_engine(engine.admin(), expectation).raise_on_mismatch(version)
        assert sample(engine, [[5, 6, 7]], 2)[0].weight_versions == (str(version),)
    updater.close()
