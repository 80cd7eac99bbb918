"""Real engines that hold their weights in FP8: what arrives, what is computed, what is found."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.families import read_shape
from megatron_rl.models.fp8_weights import fp8_weights, quantization_config
from megatron_rl.rollouts.recording.format import batch_directory
from sglang_bridge.block_fp8 import dequantize
from sglang_bridge.client import GenerateClient
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError, WeightUpdateFailed
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.server.readiness import require_external_engines
from sglang_bridge.settings import ServerSettings
from sglang_bridge.weights.audit import AuditReport, audit_engine
from sglang_bridge.weights.disk import DiskTransport
from sglang_bridge.weights.distributed import DistributedTransport
from sglang_bridge.weights.expectation import WeightExpectation
from tests.support.comparable import assert_same_weights
from tests.support.engines import ROUND_ACTIVATIONS, running_engine, running_fp8_engine
from tests.support.exactness import EXACT
from tests.support.jobs import ROOT, start_job
from tests.support.recordings import read_rollouts
from tests.support.torchrun import torchrun
from tests.support.updaters import SoleUpdater, in_units

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

LAYERS = 3
EXPERTS = 4
TOP_K = 2
Weights = dict[str, torch.Tensor]
ENGINE_ERROR = 2e-6 if EXACT else 5e-5


def write_model(directory: Path, **sizes: int) -> Path:
    """Write a random model that blocks of 128 x 128 divide. sizes: replace sizes of its config."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "vocab_size": 200,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**defaults | sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
    model.config.dtype = torch.float32
    model.save_pretrained(directory)
    return directory


def quantize(weights: Weights, model: Path) -> Weights:
    from megatron_rl.mcore import compat

    compat.install()
    from megatron_rl.mcore.weights.fp8_weights import quantize_weights

    names = fp8_weights(read_shape(model))
    return dict(quantize_weights(iter(in_units(weights).items()), names))


def dequantize_stream(stream: Weights) -> Weights:
    return {
        name: dequantize(tensor, stream[f"{name}_scale_inv"], torch.float32)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stream.items()
        if not name.endswith("_scale_inv")
    }


def with_weights(model: Path, weights: Weights, target: Path) -> Path:
    shutil.copytree(model, target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def stream(model: Path) -> Weights:
    return quantize(load_file(model / "model.safetensors"), model)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedEngine]:
    """A server that starts without weights, as a run starts it. Activations are not rounded."""
    settings = ServerSettings(quantization="fp8", max_running_requests=16)
    with running_fp8_engine(settings, model, tmp_path_factory.mktemp("logs")) as server:
        yield server


Push = Callable[[Weights, int], None]


@pytest.fixture
def push(engine: ManagedEngine) -> Iterator[Push]:
    updater = SoleUpdater(
        DistributedTransport(backend="gloo", timeout_seconds=60), bucket_bytes=256 * 1024
    )
    yield lambda weights, version: updater.push(iter(weights.items()), version, [engine.admin()])
    updater.close()


def audit(engine: ManagedEngine, weights: Weights) -> AuditReport:
    expectation = WeightExpectation(dtype=torch.float32, num_experts=EXPERTS)
    for name, tensor in weights.items():
        expectation.add(name, tensor)
    return audit_engine(engine.admin(), expectation)


def test_weights_arrive_over_the_process_group(
    engine: ManagedEngine, push: Push, stream: Weights
) -> None:
    push(stream, 5)
    report = audit(engine, stream)
    assert report.mismatches == ()
    # Of each layer: qkv, o, w13 and w2 with their codes and scales, four norms and the router
    assert report.num_compared == LAYERS * (3 * 4 + 5) + 3
    (checksums,) = engine.admin().checksums()
    fused_name = "model.layers.1.self_attn.qkv_proj.weight"
    assert {fused_name, f"{fused_name}:codes", f"{fused_name}_scale_inv"} <= checksums.keys()


def test_weights_arrive_through_files(
    engine: ManagedEngine, model: Path, stream: Weights, push: Push, tmp_path: Path
) -> None:
    push({name: torch.zeros_like(tensor) for name, tensor in stream.items()}, 1)
    assert audit(engine, stream).mismatches
    transport = DiskTransport(directory=tmp_path, config_from=model, timeout_seconds=60)
    updater = SoleUpdater(transport, bucket_bytes=256 * 1024)
    updater.push(iter(stream.items()), 2, [engine.admin()])
    assert audit(engine, stream).mismatches == ()


@pytest.mark.parametrize(
    ("weight", "parameter"),
    [
        ("self_attn.v_proj.weight", "self_attn.qkv_proj.weight"),
        ("mlp.experts.3.up_proj.weight", "mlp.experts.w13_weight"),
    ],
)
def test_a_flipped_code_and_a_flipped_scale_are_found(
    engine: ManagedEngine, push: Push, stream: Weights, weight: str, parameter: str
) -> None:
    weight = f"model.layers.2.{weight}"
    parameter = f"model.layers.2.{parameter}"
    codes = stream[weight].clone()
    codes.view(torch.uint8)[77, 5] ^= 1
    push(stream | {weight: codes}, 2)
    mismatches = {mismatch.parameter: mismatch for mismatch in audit(engine, stream).mismatches}
    assert mismatches.keys() == {parameter, f"{parameter}:codes"}
    assert weight in mismatches[f"{parameter}:codes"].tensors

    scales = stream[f"{weight}_scale_inv"].clone()
    scales.view(torch.int32)[0, 0] ^= 1  # too little for a value in bfloat16
    push(stream | {f"{weight}_scale_inv": scales}, 3)
    mismatches = {mismatch.parameter: mismatch for mismatch in audit(engine, stream).mismatches}
    assert f"{parameter}_scale_inv" in mismatches and f"{parameter}:codes" not in mismatches
    assert f"{weight}_scale_inv" in mismatches[f"{parameter}_scale_inv"].tensors

    push(stream, 4)
    assert audit(engine, stream).mismatches == ()


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"]
)
def test_an_engine_of_another_vocabulary_or_shape_refuses_the_weights(
    engine: ManagedEngine, push: Push, stream: Weights, name: str
) -> None:
    """SGLang takes the right ones afterwards."""
    with pytest.raises(WeightUpdateFailed, match=engine.url):
        push(stream | {name: stream[name].repeat_interleave(2, 0)}, 7)
    push(stream, 8)
    assert audit(engine, stream).mismatches == ()


def test_rows_that_an_engine_leaves_out_are_found(
    engine: ManagedEngine, push: Push, stream: Weights
) -> None:
    """SGLang takes the rows that it has room for of an expert, and says nothing."""
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    names = (name, f"{name}_scale_inv")
    weights = stream | {half: stream[half].repeat(2, 1) for half in names}
    push(weights, 7)
    parameter = "model.layers.1.mlp.experts.w13_weight"
    assert {mismatch.parameter for mismatch in audit(engine, weights).mismatches} == {
        f"{parameter}{suffix}" for suffix in ("", ":codes", "_scale_inv")
    }


def sample(engine: ManagedEngine, prompt: list[int], tokens: int) -> Any:
    async def generate() -> Any:
        options = {"api_key": engine.keys.api_key, "deadline_seconds": 120}
        async with GenerateClient(engine.url, route_shape=(LAYERS, TOP_K), **options) as client:
            sampling = SimpleNamespace(
                max_new_tokens=tokens, temperature=1.0, stop_token_ids=(), top_p=1.0
            )
            return await client.generate(prompt, sampling, rid="a")

    return asyncio.run(generate())


def test_the_engine_computes_with_the_dequantized_weights(
    engine: ManagedEngine, push: Push, model: Path, stream: Weights, tmp_path: Path
) -> None:
    from transformers import Qwen3MoeForCausalLM

    push(stream, 6)
    prompt = list(range(10, 60))
    response = sample(engine, prompt, 60)
    tokens = torch.tensor([*prompt, *response.output_ids])
    target = torch.from_numpy(response.logprobs.copy())
    models = {
        "dequantized": with_weights(model, dequantize_stream(stream), tmp_path / "dequantized"),
        "unquantized": model,
    }
    errors = {}
    for name, path in models.items():
        forward = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logprobs = forward(tokens[None, :-1]).logits[0].log_softmax(-1)
        own = logprobs.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0]
        errors[name] = float((own - target).abs().max())
    print(f"engine and transformers, max of {len(target)} tokens: {errors}")
    assert errors["dequantized"] <= ENGINE_ERROR
    assert errors["unquantized"] > 1e-3


def test_external_engines_are_compared_with_the_trainer(engine: ManagedEngine, model: Path) -> None:
    shape = read_shape(model)

    def check(quantization: dict[str, Any] | None) -> None:
        require_external_engines(
            [Engine(url=engine.url)],
            engine.keys,
            ServerSettings(start_timeout_s=20),
            return_routes=True,
            model_path=str(model),
            quantization=quantization,
        )

    check(quantization_config(shape))
    with pytest.raises(EngineError, match=r"engine\.quantization=null"):
        check(None)
    with pytest.raises(EngineError, match=r"unquantized modules \[\] instead of \[layers\.0\]"):
        check(quantization_config(shape, unquantized_first=1))


def complete_run(root: Path, *overrides: str) -> Path:
    """Complete a run of FP8 engines, whose first layer is not quantized."""
    job = start_job(
        root,
        "model=fp8_tiny",
        "engine.quantization=fp8",
        "engine.unquantized_first_layers=1",
        "credit.all_incorrect=zvp",
        "train.total_steps=2",
        "run.checkpoint_every=1",
        "run.save_weights=true",
        "sync.audit_every=1",
        *overrides,
    )
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output[-4000:]
    return root / "job"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_run(tmp_path_factory.mktemp("run"))


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_every_sync_of_a_run_is_audited_by_value(run: Path) -> None:
    values = records(run)
    assert len(values) == 3
    for record in values:
        assert record["sync/audit_mismatches"] == 0
        # Four norms and the router of four layers, the outer three, and four matrices of each
        # layer, with codes and scales in three of them
        assert record["sync/audit_compared"] == 4 * 5 + 3 + 4 + 3 * 3 * 4
    assert values[1]["train/samples"] > 0 and values[1]["mismatch/k3_kl"] > 1e-6


@pytest.mark.nightly
@pytest.mark.skipif(
    not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
)
def test_a_run_repeats_with_two_engines_and_fewer_requests_at_a_time(
    run: Path, tmp_path: Path
) -> None:
    other = complete_run(tmp_path, "engine.count=2", "engine.max_running_requests=24")
    assert_same_weights(run, other, 2)
    assert [r["mismatch/k3_kl"] for r in records(run)[1:]] == [
        r["mismatch/k3_kl"] for r in records(other)[1:]
    ]


@pytest.mark.nightly
def test_an_engine_that_loads_the_export_equals_the_synced_one(run: Path, tmp_path: Path) -> None:
    """The last sync of the run has sent the same, bit for bit."""
    from launch import checkpoint

    out = tmp_path / "exported"
    options = ("--fp8", "--unquantized-first", "1")
    torchrun(
        ROOT / "launch/checkpoint.py", "export", str(run), "--out", str(out), *options, ranks=2
    )
    assert checkpoint.main(["export", str(run), "--out", str(out), *options]) != 0, "it exists"
    shape = read_shape(run / "checkpoints/step-2")
    weights: Weights = {}
    for file in (run / "checkpoints/step-2").glob("*.safetensors"):
        weights |= load_file(file)
    from megatron_rl.mcore.weights.fp8_weights import quantize_weights

    names = fp8_weights(shape, unquantized_first=1)
    sent_weights = dict(quantize_weights(iter(weights.items()), names))
    with running_engine(out, tmp_path) as loaded_engine:
        expectation = WeightExpectation(dtype=torch.float32, num_experts=shape.num_experts)
        for name, tensor in sent_weights.items():
            expectation.add(name, tensor)
        report = audit_engine(loaded_engine.admin(), expectation)
    assert report.mismatches == ()
    assert report.num_compared == records(run)[-1]["sync/audit_compared"]


@pytest.mark.nightly
@pytest.mark.distributed
def test_megatron_with_dequantized_weights_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's forward pass, with the routes replayed. The engine rounds no activations."""
    monkeypatch.setenv(ROUND_ACTIVATIONS, "0")
    start = write_model(tmp_path / "start")
    recording = record_rollouts(tmp_path, start)
    stream = quantize(load_file(start / "model.safetensors"), start)
    for name, weights in {"dequantized": dequantize_stream(stream), "unquantized": {}}.items():
        path = start if not weights else with_weights(start, weights, tmp_path / name)
        case = f"one-none:{path}:{recording}:4096:{tmp_path / name}.pt"
        torchrun(Path(__file__).with_name("megatron_logprobs.py"), case, ranks=1)
    rollouts = recorded_logprobs(recording)
    errors = {}
    for name in ("dequantized", "unquantized"):
        own = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert own.keys() == rollouts.keys()
        differences = torch.cat([(own[key] - rollouts[key]).abs() for key in rollouts])
        errors[name] = (float(differences.mean()), float(differences.max()))
    print(f"engine and Megatron, mean and max of {len(differences)} tokens: {errors}")
    assert errors["dequantized"][1] <= ENGINE_ERROR
    assert errors["unquantized"][1] > 1e-3


def record_rollouts(root: Path, model: Path) -> Path:
    """Sample from an FP8 engine, and return the recorded batch."""
    assets = ROOT / "megatron_rl/models/assets"
    for file in (assets / "qwen3_moe_fp8_blank").glob("token*"):
        shutil.copy(file, model)
    job = start_job(
        root,
        "model=hf",
        f"model.path={model}",
        "model.dtype=float32",
        "model.recompute=none",
        "engine.quantization=fp8",
        "mode=rollout_only",
        "train.total_steps=1",
        "rollout.prompts_per_step=32",
    )
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output[-4000:]
    return batch_directory(root / "job/recorded", 1)


def recorded_logprobs(recording: Path) -> Weights:
    """Return the engine's log-probabilities of the sampled tokens, by rollout."""
    return {
        rollout.rollout_id: torch.cat(
            [
                torch.from_numpy(segment.logprobs.copy())
                for segment in rollout.segments
                if segment.logprobs is not None
            ]
        )
        for rollout in read_rollouts(recording)
    }
