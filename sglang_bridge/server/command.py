"""A server's command line and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from sglang_bridge.addresses import interface_of
from sglang_bridge.plugin import narrow_routes
from sglang_bridge.server.nccl import nccl_environment
from sglang_bridge.server.quantization import format_override
from sglang_bridge.settings import (
    MANAGED_KEEP_ALIVE_SECONDS,
    ServerPlace,
    ServerSettings,
    kv_cache_slots,
)

# Without a GPU, SGLang uses its own torch fallbacks and cannot overlap scheduling with a device. It
# must not wait busily either, because an idle engine would take a core from the trainer.
_CPU_ARGS = (
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
)
# This runner records the experts of every token. SGLang's default for Qwen3-MoE on the newest GPUs
# does not.
RECORDING_RUNNER = "triton"
# Without this variable SGLang starts no more ranks on CPUs than the machine has NUMA nodes.
_THREAD_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
# Without this variable, CUDA graphs keep their memory while an engine sleeps.
_SLEEPING_GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
_LOOPBACK = frozenset({"127.0.0.1", "localhost"})


def build_argv(
    settings: ServerSettings,
    place: ServerPlace,
    *,
    port: int,
    key_config: Path,
    meeting: str | None = None,
) -> list[str]:
    """Build the server's argument list. key_config: see `keys.write_server_config`.

    meeting: the host and port where the servers of an engine over several nodes meet.
    """
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
        "--enable-metrics",  # its counters are compared with the account of tokens
    ]
    if (slots := kv_cache_slots(settings, place.device)) is not None:
        argv.append(f"--max-total-tokens={slots}")
    if place.seed is not None:
        argv.append(f"--random-seed={place.seed}")
    if place.quantization is not None:
        argv.append(f"--json-model-override-args={format_override(place.quantization)}")
    if place.return_routes:
        argv.append("--enable-return-routed-experts")
        if place.device == "cuda":
            argv.append(f"--moe-runner-backend={RECORDING_RUNNER}")
    argv.append(_start_weights(place))
    if place.memory_fraction is not None:
        argv += ["--enable-memory-saver", f"--mem-fraction-static={place.memory_fraction:g}"]
    if place.num_servers > 1:
        argv += _node_arguments(place, meeting)
    if place.device == "cpu":
        argv += _CPU_ARGS
    return [*argv, *settings.extra_args]


def _start_weights(place: ServerPlace) -> str:
    """The argument that says which weights a server starts with."""
    if place.load_format is not None or place.quantization is not None:
        # The files hold no quantized weights. The first weight update brings them.
        return "--load-format=dummy"
    # Version 0 is the start checkpoint. Its rollouts may be scored before any weight update.
    return "--weight-version=0"


def _node_arguments(place: ServerPlace, meeting: str | None) -> tuple[str, ...]:
    """The arguments of one of the servers of an engine over several nodes."""
    return (
        f"--nnodes={place.num_servers}",
        f"--node-rank={place.server_rank}",
        f"--dist-init-addr={meeting}",
    )


def cpu_shim_path() -> Path:
    """The directory that comes first on the PYTHONPATH of CPU servers."""
    return Path(__file__).parents[1] / "cpu_shim"


def build_environment(
    settings: ServerSettings, place: ServerPlace, parent: Mapping[str, str]
) -> dict[str, str]:
    """Build the server's environment from this process's.

    torchrun's variables are removed, because they would mislead the server's own process group.
    """
    environment = {key: value for key, value in parent.items() if not _belongs_to_torchrun(key)}
    environment |= {
        # torchrun sets it for several ranks of a node. Without it, torch would take every core
        "OMP_NUM_THREADS": parent.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(MANAGED_KEEP_ALIVE_SECONDS),
        "PYTHONUNBUFFERED": "1",
        narrow_routes.VARIABLE: parent.get(narrow_routes.VARIABLE, "1"),
    }
    search = [str(Path(__file__).parents[2])]
    if place.device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if settings.tp > 1:
            environment.setdefault(_THREAD_BINDING, _any_core(settings.tp))
        search.insert(0, str(cpu_shim_path()))
    else:
        environment |= nccl_environment(parent, settings)
    if place.memory_fraction is not None:
        environment[_SLEEPING_GRAPHS] = "1"
    if place.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            _devices(place.gpus, parent.get("CUDA_VISIBLE_DEVICES"))
        )
    if parent.get("PYTHONPATH"):
        search.append(parent["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(search)
    interface = _gloo_interface(place)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def _gloo_interface(place: ServerPlace) -> str | None:
    """The interface on which the ranks of an engine meet. None: the one that gloo chooses."""
    if place.host in _LOOPBACK:
        return "lo"
    if place.num_servers == 1:
        return None
    # By itself, gloo would use the address of the node's name, which may be a loopback one
    return interface_of(place.host)


def _any_core(ranks: int) -> str:
    """Let each rank of an engine use all cores of this process, as an engine of one rank may."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return "|".join([cores] * ranks)


def _devices(gpus: tuple[int, ...], visible: str | None) -> list[str]:
    """Select the engine's devices.

    gpus: indices into the devices that this process may see. A scheduler may have restricted them.
    """
    if visible is None:
        return [str(gpu) for gpu in gpus]
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    if max(gpus) >= len(devices):
        raise ValueError(
            f"engine GPUs {gpus} with CUDA_VISIBLE_DEVICES={visible!r}: "
            f"it lists only {len(devices)} devices"
        )
    return [devices[gpu] for gpu in gpus]


def _belongs_to_torchrun(key: str) -> bool:
    return key.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_")) or key in {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
