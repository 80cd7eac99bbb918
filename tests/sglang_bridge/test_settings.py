"""What a server cannot be started with."""

from pathlib import Path

import pytest

from sglang_bridge.keys import create_keys
from sglang_bridge.lifeline import Lifeline
from sglang_bridge.server import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings, refusals


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_defaults_and_unknown_options_are_accepted(device: str) -> None:
    dtype = "float32" if device == "cpu" else "bfloat16"
    for settings in (ServerSettings(dtype=dtype), ServerSettings(dtype=dtype, extra_args=["--random-seed=3"])):
        assert list(refusals(settings, device)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quantized_engines_are_refused(device: str) -> None:
    (problem,) = refusals(ServerSettings(quantization="fp8", dtype="bfloat16"), device)  # type: ignore[arg-type]
    assert str(problem).startswith("engine.quantization=fp8: Weights are sent unquantized")


def test_float32_has_no_kernels_on_gpus() -> None:
    (problem,) = refusals(ServerSettings(dtype="float32"), "cuda")
    assert (problem.key, problem.value) == ("engine.dtype", "float32")
    assert list(refusals(ServerSettings(dtype="float32"), "cpu")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key=x"], "--api-key, which has a setting of its own"),
        (["--port", "1"], "--port"),
        (["--dp-size=2"], "--dp-size, which is not supported"),
        (["--tokenizer-worker-num=2"], "--tokenizer-worker-num"),
        (["--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
        (["--load-format=dummy"], "--load-format"),
        ([""], "an empty argument"),
        (["=x"], "an empty argument"),
        # abbreviations that SGLang's parser expands
        (["--hos=0.0.0.0"], "--hos"),
        (["--model=/other"], "--model"),
        (["--tensor-parallel-size=2"], "--tensor-parallel-size"),
        (["--disagg=prefill"], "--disagg"),
        # one side's only, or where nothing records routes
        (["--enable-symm-mem"], "--enable-symm-mem"),
        (["--enable-nccl-nvls"], "--enable-nccl-nvls"),
        (["--moe-runner-backend=flashinfer_trtllm"], "--moe-runner-backend"),
    ],
)
def test_options_that_are_the_bridges_or_unsupported(arguments: list[str], words: str) -> None:
    (problem,) = refusals(ServerSettings(extra_args=arguments), "cpu")
    assert (problem.key, problem.value) == ("engine.extra_args", arguments)
    assert words in problem.rule and problem.remedy.startswith("Remove")


def test_every_problem_is_told_at_once() -> None:
    settings = ServerSettings(quantization="fp8", extra_args=["--port=1", "--nnodes=2"])
    assert len(list(refusals(settings, "cpu"))) == 3


@pytest.mark.parametrize(
    ("settings", "host", "words"),
    [
        (ServerSettings(extra_args=["--port=1"]), "127.0.0.1", r"engine\.extra_args"),
        (ServerSettings(tp=2, ep=3), "127.0.0.1", r"engine\.ep=3"),
        (ServerSettings(), "0.0.0.0", "not a loopback or private address"),
    ],
)
def test_nothing_is_started_with_them(tmp_path: Path, settings: ServerSettings, host: str, words: str) -> None:
    lifeline, log_path = Lifeline(), tmp_path / "engine.log"
    place = ServerPlace(model_path="/m", device="cpu", host=host)
    with pytest.raises(ValueError, match=words):
        ManagedEngine.start(settings, place, keys=create_keys(), log_path=log_path, lifeline=lifeline)
    assert list(tmp_path.iterdir()) == []
    lifeline.close()
