"""A server's command line and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from sglang_bridge.settings import ServerPlace, ServerSettings, kv_cache_slots

# Without a GPU: SGLang's own torch fallbacks, no overlap of scheduling with a device that is not
# there, and no busy waiting: an idle engine would take a core from the trainer.
_CPU_ARGS = (
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
)
# Records the experts of every token. SGLang's own choice for Qwen3-MoE on the newest GPUs does not.
RECORDING_RUNNER = "triton"
_LOOPBACK = frozenset({"127.0.0.1", "localhost"})


def build_argv(
    settings: ServerSettings, place: ServerPlace, *, port: int, key_config: Path
) -> list[str]:
    """The server's argument list. key_config: see `keys.write_server_config`."""
    argv = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--config",
        str(key_config),
        "--model-path",
        place.model_path,
        f"--host={place.host}",
        f"--port={port}",
        f"--device={place.device}",
        f"--dtype={settings.dtype}",
        f"--tp-size={settings.tp}",
        f"--ep-size={settings.ep}",
        f"--max-running-requests={settings.max_running_requests}",
        "--skip-tokenizer-init",
        "--log-level-http=warning",  # no line per request
    ]
    if (slots := kv_cache_slots(settings, place.device)) is not None:
        argv.append(f"--max-total-tokens={slots}")
    if place.seed is not None:
        argv.append(f"--random-seed={place.seed}")
    if settings.quantization is not None:
        argv.append(f"--quantization={settings.quantization}")
    if place.return_routes:
        argv.append("--enable-return-routed-experts")
        argv += [f"--moe-runner-backend={RECORDING_RUNNER}"] if place.device == "cuda" else []
    if place.load_format is not None:
        argv.append(f"--load-format={place.load_format}")
    else:
        argv.append(
            "--weight-version=0"
        )  # the start checkpoint: what it answers may be judged before any sync
    if place.device == "cpu":
        argv += _CPU_ARGS
    return [*argv, *settings.extra_args]


def cpu_shim_path() -> Path:
    """The directory that goes first on PYTHONPATH of CPU servers."""
    return Path(__file__).parents[1] / "cpu_shim"


def build_environment(
    settings: ServerSettings, place: ServerPlace, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The server's environment: the inherited one without torchrun's variables, which would mislead
    its own group.
    """
    environment = {key: value for key, value in inherited.items() if not _belongs_to_torchrun(key)}
    environment |= {
        "OMP_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    search = [str(Path(__file__).parents[2])]
    if place.device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        search.insert(0, str(cpu_shim_path()))
    else:
        environment |= nccl_environment(inherited)
    if place.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            _devices(place.gpus, inherited.get("CUDA_VISIBLE_DEVICES"))
        )
    if inherited.get("PYTHONPATH"):
        search.append(inherited["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(search)
    if place.host in _LOOPBACK:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def nccl_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """What NCCL has to find in the environment of trainer and engines alike, before either starts
    it.

    Their common group would hang if one side used cuMem or NVLS buffers and the other did not;
    SGLang switches off both unless its environment says otherwise.
    """
    return {name: inherited.get(name, "0") for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}


def _devices(gpus: tuple[int, ...], visible: str | None) -> list[str]:
    """The engine's devices: `gpus` counts within what this process may see, which a scheduler may
    have restricted.
    """
    if visible is None:
        return [str(gpu) for gpu in gpus]
    listed = [device.strip() for device in visible.split(",") if device.strip()]
    if max(gpus) >= len(listed):
        raise ValueError(
            f"engine GPUs {gpus} with CUDA_VISIBLE_DEVICES={visible!r}: it lists only {len(listed)} devices"
        )
    return [listed[gpu] for gpu in gpus]


def _belongs_to_torchrun(key: str) -> bool:
    return key.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_")) or key in {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
