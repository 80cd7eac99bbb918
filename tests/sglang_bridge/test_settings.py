"""Refused settings of a server."""

from pathlib import Path

import pytest

from sglang_bridge.keys import create_keys
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings, server_refusals


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_defaults_and_unknown_options_are_accepted(device: str) -> None:
    dtype = "float32" if device == "cpu" else "bfloat16"
    for settings in (
        ServerSettings(dtype=dtype),
        ServerSettings(dtype=dtype, extra_args=["--random-seed=3"]),
    ):
        assert list(server_refusals(settings, device)) == []  # type: ignore[arg-type]


def test_float32_is_refused_on_gpus() -> None:
    (refusal,) = server_refusals(ServerSettings(dtype="float32"), "cuda")
    assert (refusal.key, refusal.value) == ("engine.dtype", "float32")
    assert list(server_refusals(ServerSettings(dtype="float32"), "cpu")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key=x"], "--api-key, which has its own setting"),
        (["--port", "1"], "--port"),
        (["--json-model-override-args", "{}"], "--json-model-override-args"),
        (["--json-model-over={}"], "--json-model-over"),
        (["--fp8-gemm-backend=deep_gemm"], "in a layout of its own"),
        (["--dp-size=2"], "--dp-size, which is not supported"),
        (["--nnodes=2"], "engine.nodes_per_engine"),
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
        # options that change NCCL on one side only, or record no routes
        (["--enable-symm-mem"], "--enable-symm-mem"),
        (["--enable-nccl-nvls"], "--enable-nccl-nvls"),
        (["--moe-runner-backend=flashinfer_trtllm"], "--moe-runner-backend"),
    ],
)
def test_reserved_and_unsupported_options_are_refused(arguments: list[str], words: str) -> None:
    (refusal,) = server_refusals(ServerSettings(extra_args=arguments), "cpu")
    assert (refusal.key, refusal.value) == ("engine.extra_args", arguments)
    assert words in refusal.rule and refusal.remedy.startswith("Remove")


OPTIONS_BY_REASON = {
    "copies or moves experts": [
        "--enable-eplb",
        "--ep-num-redundant-experts=2",
        "--init-expert-location=trivial",
        "--ep-dispatch-algorithm=fake",
        "--elastic-ep-backend=mooncake",
        "--enable-paged-experts",
    ],
    "returns the record of one rank": [
        "--moe-a2a-backend=deepep",
        "--attn-dp-size=2",
        "--attention-data-parallel-size=2",
        "--attn-cp-size=2",
        "--dcp-size=2",
        "--moe-dp-size=2",
        "--dwdp-size=2",
        "--enable-prefill-cp",
    ],
    "one overwrites the other's routes": [
        "--enable-two-batch-overlap",
        "--enable-two",
        "--enable-pdmux",
    ],
    "no room for draft tokens": ["--speculative-algorithm=NGRAM"],
    "get the routes of other tokens": [
        "--enable-hierarchical-cache",
        "--enable-lmcache",
        "--enable-flexkv",
        "--radix-cache-backend=x",
        "--enable-unified-cache-external-linker",
        "--disaggregation-mode=decode",
    ],
    "do not record the experts": [
        "--model-impl=transformers",
        "--moe-runner-backend=flashinfer_trtllm",
    ],
}


@pytest.mark.parametrize(
    ("reason", "argument"),
    [(reason, a) for reason, options in OPTIONS_BY_REASON.items() for a in options],
)
def test_options_that_break_recorded_routes_are_refused(reason: str, argument: str) -> None:
    (refusal,) = server_refusals(ServerSettings(extra_args=[argument]), "cpu")
    option = argument.split("=")[0]
    assert refusal.rule.startswith(f"It has {option}, which is not supported: ")
    assert reason in refusal.rule
    assert refusal.remedy == f"Remove {option}"


def test_options_that_keep_routes_are_accepted() -> None:
    harmless = ["--disable-radix-cache", "--enable-mixed-chunk", "--enable-single-batch-overlap"]
    assert list(server_refusals(ServerSettings(extra_args=harmless), "cpu")) == []


def test_all_refusals_are_reported_together() -> None:
    settings = ServerSettings(dtype="float32", extra_args=["--port=1", "--nnodes=2"])
    assert len(list(server_refusals(settings, "cuda"))) == 3


@pytest.mark.parametrize(
    ("settings", "host", "words"),
    [
        (ServerSettings(extra_args=["--port=1"]), "127.0.0.1", r"engine\.extra_args"),
        (ServerSettings(tp=2, ep=3), "127.0.0.1", r"engine\.ep=3"),
        (ServerSettings(), "0.0.0.0", "not a loopback or private address"),
    ],
)
def test_no_server_is_started_with_refused_settings(
    tmp_path: Path, settings: ServerSettings, host: str, words: str
) -> None:
    lifeline = Lifeline()
    log_path = tmp_path / "engine.log"
    place = ServerPlace(model_path="/m", device="cpu", host=host)
    with pytest.raises(ValueError, match=words):
        ManagedEngine.start(
            settings, place, keys=create_keys(), log_path=log_path, lifeline=lifeline
        )
    assert list(tmp_path.iterdir()) == []
    lifeline.close()
