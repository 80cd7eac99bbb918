"""An engine's command line and environment."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bridge import addresses
from sglang_bridge.server.command import (
    build_argv,
    build_environment,
    cpu_shim_path,
)
from sglang_bridge.settings import MANAGED_KEEP_ALIVE_SECONDS, ServerPlace, ServerSettings

PLACE = ServerPlace(model_path="/m", device="cpu")
GPU = replace(PLACE, device="cuda", gpus=(0,))
KEYS = Path("/k.yaml")


def argv_of(place: ServerPlace = PLACE, **settings: Any) -> list[str]:
    return build_argv(ServerSettings(**settings), place, port=21000, key_config=KEYS)


def environment_of(parent: dict[str, str], place: ServerPlace = PLACE) -> dict[str, str]:
    return build_environment(ServerSettings(), place, parent)


def test_dtype_device_and_address_are_always_explicit() -> None:
    argv = argv_of()
    assert {"--dtype=float32", "--device=cpu", "--host=127.0.0.1", "--port=21000"} <= set(argv)
    assert argv[argv.index("--config") + 1] == "/k.yaml"
    assert {"--skip-tokenizer-init", "--enable-return-routed-experts"} <= set(argv)


def test_extra_arguments_come_last_and_override() -> None:
    argv = argv_of(extra_args=["--random-seed=3"])
    assert argv[-1] == "--random-seed=3"


def test_an_engine_that_can_sleep_gets_its_share_and_gives_graphs_back() -> None:
    place = replace(GPU, memory_fraction=0.5)
    argv = argv_of(place)
    assert {"--enable-memory-saver", "--mem-fraction-static=0.5"} <= set(argv)
    assert environment_of({}, place)["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    other = argv_of(GPU)
    assert not any("memory-saver" in word or "mem-fraction" in word for word in other)
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in environment_of({}, GPU)


def test_routes_can_be_disabled() -> None:
    argv = argv_of(replace(PLACE, return_routes=False))
    assert "--enable-return-routed-experts" not in argv


def test_engines_count_their_tokens() -> None:
    assert "--enable-metrics" in argv_of()


def test_load_format_is_the_checkpoint_or_dummy() -> None:
    assert not any(argument.startswith("--load-format") for argument in argv_of())
    assert "--load-format=dummy" in argv_of(replace(PLACE, load_format="dummy"))


def test_quantized_engines_start_without_weights() -> None:
    """The checkpoint holds unquantized weights, which SGLang would load without scales."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    argv = argv_of(replace(PLACE, quantization=config), quantization="fp8")
    (override,) = [argument for argument in argv if argument.startswith("--json-model")]
    assert json.loads(override.partition("=")[2]) == {"quantization_config": config}
    assert argv.count("--load-format=dummy") == 1
    assert not any(argument.startswith(("--quantization", "--weight-version")) for argument in argv)


def test_start_checkpoint_has_weight_version_0() -> None:
    """Without weight updates, as in mode=eval, rollouts need a version that is a number."""
    assert "--weight-version=0" in argv_of()
    assert not any(
        argument.startswith("--weight-version")
        for argument in argv_of(replace(PLACE, load_format="dummy"))
    )


def test_only_cpu_engines_get_the_shim() -> None:
    cpu = environment_of({})
    assert cpu["PYTHONPATH"].split(os.pathsep)[0] == str(cpu_shim_path())
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    gpu = environment_of({"PYTHONPATH": "/mine"}, replace(PLACE, device="cuda", gpus=(2, 3)))
    assert str(cpu_shim_path()) not in gpu["PYTHONPATH"]
    assert gpu["PYTHONPATH"].split(os.pathsep)[-1] == "/mine"
    assert gpu["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SGLANG_USE_CPU_ENGINE" not in gpu


def test_torchrun_variables_do_not_reach_the_engine() -> None:
    parent = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "HOME": "/h",
    }
    environment = environment_of(parent)
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()
    assert environment["HOME"] == "/h"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment_of({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    assert environment["SGLANG_TIMEOUT_KEEP_ALIVE"] == str(MANAGED_KEEP_ALIVE_SECONDS)


def test_engine_gpus_are_indices_into_visible_devices() -> None:
    gpu = replace(PLACE, device="cuda", gpus=(1, 2))
    assert environment_of({"CUDA_VISIBLE_DEVICES": "4,5,7"}, gpu)["CUDA_VISIBLE_DEVICES"] == "5,7"
    with pytest.raises(ValueError, match="lists only 2"):
        environment_of({"CUDA_VISIBLE_DEVICES": "4,5"}, gpu)


def test_kv_cache_size_is_fixed_on_cpus_and_left_to_sglang_on_gpus() -> None:
    assert "--max-total-tokens=16384" in argv_of()
    assert not any("--max-total-tokens" in argument for argument in argv_of(GPU, dtype="bfloat16"))
    for place in (PLACE, GPU):
        assert "--max-total-tokens=4096" in argv_of(place, max_total_tokens=4096)


def test_replay_on_gpus_selects_kernels_that_record_routes() -> None:
    """SGLang's default on the newest GPUs, flashinfer_trtllm, routes inside its kernel.

    It would record zeros.
    """
    assert "--moe-runner-backend=triton" in argv_of(GPU)
    assert not any(
        "--moe-runner-backend" in argument
        for argument in argv_of(replace(GPU, return_routes=False))
    )
    assert not any("--moe-runner-backend" in argument for argument in argv_of(PLACE))


def test_seed_reaches_the_engine() -> None:
    assert "--random-seed=7" in argv_of(replace(PLACE, seed=7))
    assert not any("--random-seed" in argument for argument in argv_of())


def test_servers_of_several_nodes_know_their_number_and_where_they_meet() -> None:
    place = replace(PLACE, num_servers=3, server_rank=1)
    settings = ServerSettings(tp=6)
    argv = build_argv(settings, place, port=1, key_config=KEYS, meeting="10.0.0.1:2")
    assert {"--nnodes=3", "--node-rank=1", "--dist-init-addr=10.0.0.1:2"} <= set(argv)
    assert not any(word.startswith("--nnodes") for word in argv_of())


def test_gloo_uses_the_interface_over_which_the_servers_of_an_engine_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name of a machine may have a loopback address, as Debian's installer gives it."""
    interface = [SimpleNamespace(address="10.0.0.5")]
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: {"lo": [], "ib0": interface})
    place = replace(PLACE, host="10.0.0.5", num_servers=2)
    assert environment_of({}, place)["GLOO_SOCKET_IFNAME"] == "ib0"
    environment = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert environment_of(environment, place)["GLOO_SOCKET_IFNAME"] == "eth7"
    for other in (replace(place, num_servers=1), replace(place, host="10.0.0.6")):
        assert "GLOO_SOCKET_IFNAME" not in environment_of({}, other)
