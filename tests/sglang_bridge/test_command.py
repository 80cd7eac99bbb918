"""An engine's command line and environment."""

import os
from pathlib import Path

import pytest

from sglang_bridge import cpu_shim_path
from sglang_bridge.command import build_argv, build_environment
from sglang_bridge.settings import EngineSettings

CPU = {
    "model_path": "/m",
    "dtype": "float32",
    "device": "cpu",
    "max_running_requests": 8,
    "max_total_tokens": 1024,
}


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(**{**CPU, **changes})  # type: ignore[arg-type]


def test_dtype_device_and_address_are_always_explicit() -> None:
    argv = build_argv(settings(), port=21000, key_config=Path("/k.yaml"))
    assert {"--dtype=float32", "--device=cpu", "--host=127.0.0.1", "--port=21000"} <= set(argv)
    assert argv[argv.index("--config") + 1] == "/k.yaml"
    assert {"--skip-tokenizer-init", "--enable-return-routed-experts"} <= set(argv)


def test_extra_arguments_come_last_so_that_they_win() -> None:
    argv = build_argv(settings(extra_args=("--random-seed=3",)), port=1, key_config=Path("/k.yaml"))
    assert argv[-1] == "--random-seed=3"


def test_routes_can_be_left_out() -> None:
    argv = build_argv(settings(return_routes=False), port=1, key_config=Path("/k.yaml"))
    assert "--enable-return-routed-experts" not in argv


def test_only_cpu_engines_get_the_shim() -> None:
    cpu = build_environment(settings(), {})
    assert cpu["PYTHONPATH"].split(os.pathsep)[0] == str(cpu_shim_path())
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    gpu = build_environment(settings(device="cuda", gpus=(2, 3)), {"PYTHONPATH": "/mine"})
    assert str(cpu_shim_path()) not in gpu["PYTHONPATH"]
    assert gpu["PYTHONPATH"].split(os.pathsep)[-1] == "/mine"
    assert gpu["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SGLANG_USE_CPU_ENGINE" not in gpu


def test_torchrun_variables_do_not_reach_the_engine() -> None:
    inherited = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h"}
    environment = build_environment(settings(threads=2), inherited)
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()
    assert environment["HOME"] == "/h"
    assert environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "auto"}, "engine.dtype='auto'"),
        ({"quantization": "fp8"}, "engine.quantization='fp8'"),
        ({"max_total_tokens": None}, "engine.max_total_tokens=null"),
        ({"extra_args": ("--api-key=x",)}, "--api-key"),
        ({"extra_args": ("--port", "1")}, "--port"),
        ({"extra_args": ("--dp-size=2",)}, "--dp-size"),
        ({"extra_args": ("--tokenizer-worker-num=2",)}, "--tokenizer-worker-num"),
        ({"extra_args": ("--enable-hierarchical-cache",)}, "--enable-hierarchical-cache"),
    ],
)
def test_what_cannot_work_is_refused(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**change)


def test_engine_gpus_count_within_what_the_scheduler_gave() -> None:
    gpu = settings(device="cuda", gpus=(1, 2))
    assert build_environment(gpu, {"CUDA_VISIBLE_DEVICES": "4,5,7"})["CUDA_VISIBLE_DEVICES"] == "5,7"
    with pytest.raises(ValueError, match="lists only 2"):
        build_environment(gpu, {"CUDA_VISIBLE_DEVICES": "4,5"})


@pytest.mark.parametrize(
    "argument", ["--hos=0.0.0.0", "--model=/other", "--tensor-parallel-size=2", "--disagg=prefill"]
)
def test_abbreviated_options_are_refused_too(argument: str) -> None:
    with pytest.raises(ValueError, match=r"engine\.extra_args"):
        settings(extra_args=(argument,))
