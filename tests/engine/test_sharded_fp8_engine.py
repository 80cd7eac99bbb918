"""FP8 engines of two ranks on CPUs: what each rank holds, what they compute, what is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerSettings
from sglang_bridge.weights.audit import AuditReport, audit_engine
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.fused_layout import rank_places
from tests.engine.test_fp8_engine import (
    EXPERTS,
    LAYERS,
    Push,
    Weights,
    dequantize_stream,
    quantize,
    sample,
    with_weights,
    write_model,
)
from tests.support.engines import running_fp8_engine
from tests.support.exactness import EXACT
from tests.support.updaters import SoleUpdater

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(420)]

KEY_VALUE_HEADS = 4
# Two blocks of 128 along every side that two ranks share
SIZES = {"hidden_size": 256, "num_key_value_heads": KEY_VALUE_HEADS, "moe_intermediate_size": 256}
# dtype and ep. SGLang's experts for CPUs cannot compute with ep=2, but load their weights.
FLOAT32 = ("float32", 1)
BFLOAT16 = ("bfloat16", 1)
SHAPES = [FLOAT32, BFLOAT16, ("bfloat16", 2)]
# Largest error of a token, against a float32 forward pass, which adds up in another order than two
# ranks. In bfloat16, routes may differ too: the mean is compared with the mean for other weights.
ENGINE_ERROR = 6e-6 if EXACT else 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", **SIZES)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedEngine]:
    """A server of two ranks that starts without weights. Activations are not rounded."""
    dtype, ep = request.param
    settings = ServerSettings(
        quantization="fp8",
        max_running_requests=8,
        dtype=dtype,
        tp=2,
        ep=ep,
        extra_args=["--skip-server-warmup"],
    )
    with running_fp8_engine(settings, model, tmp_path_factory.mktemp("logs")) as server:
        yield server


@pytest.fixture(scope="module")
def dtype(engine: ManagedEngine) -> torch.dtype:
    name = engine.admin().server_info()["dtype"]
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@pytest.fixture(scope="module")
def stream(model: Path, dtype: torch.dtype) -> Weights:
    content = load_file(model / "model.safetensors")
    return quantize({name: tensor.to(dtype) for name, tensor in content.items()}, model)


@pytest.fixture
def push(engine: ManagedEngine) -> Iterator[Push]:
    updater = SoleUpdater(
        DistributedTransport(backend="gloo", timeout_seconds=60), bucket_bytes=256 * 1024
    )
    yield lambda weights, version: updater.push(iter(weights.items()), version, [engine.admin()])
    updater.close()


def audit(engine: ManagedEngine, weights: Weights, dtype: torch.dtype) -> AuditReport:
    expectation = WeightExpectation(
        dtype=dtype,
        num_experts=EXPERTS,
        places=rank_places(engine.engine),
        num_key_value_heads=KEY_VALUE_HEADS,
    )
    for name, tensor in weights.items():
        expectation.add(name, tensor)
    return audit_engine(engine.admin(), expectation)


def test_every_rank_holds_the_codes_and_scales_of_its_shards(
    engine: ManagedEngine, push: Push, stream: Weights, dtype: torch.dtype
) -> None:
    push(stream, 5)
    report = audit(engine, stream, dtype)
    assert report.mismatches == ()
    # Of each layer: qkv, o, w13 and w2 with their codes and scales, four norms and the router
    assert report.num_compared == LAYERS * (3 * 4 + 5) + 3
    first, second = engine.admin().checksums()
    for name in ("self_attn.o_proj.weight", "mlp.experts.w2_weight"):
        for suffix in ("", ":codes", "_scale_inv"):
            parameter = f"model.layers.1.{name}{suffix}"
            assert first[parameter] != second[parameter]


def differences(
    engine: ManagedEngine, weights: Weights, dtype: torch.dtype
) -> dict[str, tuple[str, ...]]:
    """Return the tensors of each parameter that differs. Only the second rank may differ."""
    mismatches = audit(engine, weights, dtype).mismatches
    assert all("held by rank 1 " in mismatch.reason for mismatch in mismatches)
    return {mismatch.parameter: mismatch.tensors for mismatch in mismatches}


@pytest.mark.parametrize(
    ("weight", "place", "parameter"),
    [
        ("self_attn.v_proj.weight", (200, 5), "self_attn.qkv_proj.weight"),
        ("self_attn.o_proj.weight", (5, 200), "self_attn.o_proj.weight"),
        (f"mlp.experts.{EXPERTS - 1}.up_proj.weight", (200, 5), "mlp.experts.w13_weight"),
        (f"mlp.experts.{EXPERTS - 1}.down_proj.weight", (5, 200), "mlp.experts.w2_weight"),
    ],
)
def test_a_flipped_code_and_a_flipped_scale_of_the_second_rank_are_found(
    engine: ManagedEngine,
    push: Push,
    stream: Weights,
    dtype: torch.dtype,
    weight: str,
    place: tuple[int, int],
    parameter: str,
) -> None:
    weight = f"model.layers.2.{weight}"
    parameter = f"model.layers.2.{parameter}"
    codes = stream[weight].clone()
    codes.view(torch.uint8)[place] ^= 1
    push(stream | {weight: codes}, 2)
    tensors = differences(engine, stream, dtype)
    assert tensors.keys() == {parameter, f"{parameter}:codes"}
    assert weight in tensors[f"{parameter}:codes"]

    scale = f"{weight}_scale_inv"
    scales = stream[scale].clone()
    scales.view(torch.int32)[place[0] // 128, place[1] // 128] ^= 1  # too little for bfloat16
    push(stream | {scale: scales}, 3)
    tensors = differences(engine, stream, dtype)
    assert scale in tensors[f"{parameter}_scale_inv"]
    assert f"{parameter}:codes" not in tensors


def logprobs_of(model: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of tokens 1 to the last by transformers, in float32."""
    from transformers import Qwen3MoeForCausalLM

    forward = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = forward(tokens[None, :-1]).logits[0].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize("engine", [FLOAT32, BFLOAT16], indirect=True, ids=str)
def test_two_ranks_compute_with_the_dequantized_weights(
    engine: ManagedEngine, push: Push, model: Path, stream: Weights, tmp_path: Path
) -> None:
    push(stream, 6)
    prompt = list(range(10, 60))
    response = sample(engine, prompt, 60)
    tokens = torch.tensor([*prompt, *response.output_ids])
    target = torch.from_numpy(response.logprobs.copy())
    copy = with_weights(model, dequantize_stream(stream), tmp_path / "dequantized")
    errors = [
        (logprobs_of(path, tokens)[len(prompt) - 1 :] - target).abs() for path in (copy, model)
    ]
    for name, values in zip(("dequantized", "unquantized"), errors, strict=True):
        print(f"{engine.settings.dtype} {name}: mean {values.mean():.2g}, max {values.max():.2g}")
    if engine.settings.dtype == "float32":
        assert errors[0].max() <= ENGINE_ERROR < errors[1].max()
    assert errors[0].mean() < errors[1].mean() / 2
