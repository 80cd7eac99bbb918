"""The engines: who starts them, where they listen, and what they are started with."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import EngineConfig
from sglang_bridge.keys import read_keys
from sglang_bridge.ports import require_private_address
from sglang_bridge.settings import EngineSettings


def check_engine(engine: EngineConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    """Rules of both modes."""
    if engine.tp % engine.ep:
        rule = f"SGLang spreads experts over the ranks of one engine: it must divide engine.tp={engine.tp}"
        yield Refusal("engine.ep", engine.ep, rule, "Use a divisor of engine.tp")
    if engine.mode == "external":
        yield from _check_external(engine)
    else:
        yield from _check_managed(engine, facts)


def _check_external(engine: EngineConfig) -> Iterator[Refusal]:
    if not engine.urls:
        rule = "engine.mode=external needs the addresses of running servers"
        yield Refusal("engine.urls", [], rule, "Give them: engine.urls=[http://10.0.0.7:30000], or use engine=managed")
    for url in engine.urls:
        yield from _check_url(url)
    if len(engine.urls) > 1:
        yield from _check_distinct(engine.urls)
    yield from _check_server_settings(engine)
    if engine.key_file is not None:
        yield from _check_key_file(Path(engine.key_file))


def _check_distinct(urls: Sequence[str]) -> Iterator[Refusal]:
    """Two names of one server would be sent the same weights twice at once."""
    seen: dict[tuple[str, int | None], str] = {}
    for url in urls:
        for address in _addresses(url):
            other = seen.setdefault(address, url)
            if other is not url:
                yield Refusal("engine.urls", url, f"An engine is named twice: this is {other}", "Name each one once")
                break


def _addresses(url: str) -> list[tuple[str, int | None]]:
    """Where a URL leads; nothing for one that is refused anyway."""
    try:
        parts = urlsplit(url)
        found = {str(info[4][0]) for info in socket.getaddrinfo(parts.hostname, None, family=socket.AF_INET)}
        return [(address, parts.port) for address in sorted(found)]
    except (ValueError, OSError):
        return []


def _check_server_settings(engine: EngineConfig) -> Iterator[Refusal]:
    default = EngineConfig()
    for name, value, unset in (
        ("count", engine.count, default.count),
        ("device", engine.device, default.device),
        ("max_total_tokens", engine.max_total_tokens, default.max_total_tokens),
        ("threads", engine.threads, default.threads),
        ("start_timeout_s", engine.start_timeout_s, default.start_timeout_s),
        ("extra_args", engine.extra_args, default.extra_args),
    ):
        if value != unset:
            rule = "It is for starting a server, and external ones run already"
            remedy = "Remove it and set it where the server is started, or use engine=managed"
            yield Refusal(f"engine.{name}", value, rule, remedy)


def _check_url(url: str) -> Iterator[Refusal]:
    remedy = "Use http://HOST:PORT with a loopback or private address"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        yield Refusal("engine.urls", url, f"It is not a URL ({error})", remedy)
        return
    if parts.scheme == "https":
        rule = "The trainer speaks plain HTTP to its engines"
        yield Refusal("engine.urls", url, rule, f"Terminate TLS in front of it, or leave it out. {remedy}")
    elif parts.scheme != "http" or not host or port is None:
        yield Refusal("engine.urls", url, "An engine's address has a scheme, a host and a port", remedy)
    elif parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        yield Refusal("engine.urls", url, "An engine's address has no user, path, query or fragment", remedy)
    elif ":" in host or port == 0:
        yield Refusal("engine.urls", url, "An engine's address is a name or IPv4, with a port from 1", remedy)
    else:
        try:
            require_private_address(host)
        except ValueError as error:
            yield Refusal("engine.urls", url, str(error))


def _check_key_file(path: Path) -> Iterator[Refusal]:
    key, remedy = "engine.key_file", 'Write {"api_key": ..., "admin_api_key": ...} to a file with mode 0600'
    if not path.is_file():
        yield Refusal(key, str(path), "There is no such file", remedy)
    elif stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield Refusal(key, str(path), "Others can read the keys", f"chmod 600 {path}")
    else:
        try:
            read_keys(path)
        except ValueError:  # its text could show a key
            yield Refusal(key, str(path), "It does not hold two keys as JSON", remedy)


def _check_managed(engine: EngineConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    for name, value in (("urls", engine.urls or None), ("key_file", engine.key_file)):
        if value is not None:
            rule = "engine.mode=managed starts its own servers on free ports with random keys"
            yield Refusal(f"engine.{name}", value, rule, "Remove it, or use engine=external")
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and facts.num_gpus > 0)
    yield from _check_device(engine, facts)
    try:
        EngineSettings(
            model_path="",
            dtype=engine.dtype,
            device="cuda" if on_gpu else "cpu",
            max_running_requests=engine.max_running_requests,
            max_total_tokens=engine.max_total_tokens,
            quantization=engine.quantization,
            extra_args=tuple(engine.extra_args),
        )
    except ValueError as error:
        yield _taken_over(engine, error)


def _check_device(engine: EngineConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    """Trainer and engines share one process group for weights: NCCL on GPUs, gloo without, never one of each."""
    if facts.num_gpus == 0 and engine.device == "cuda":
        yield Refusal("engine.device", "cuda", "No CUDA device is visible here", "Use engine.device=auto")
    elif facts.num_gpus > 0 and engine.device == "cpu":
        rule = f"The trainer sends weights from the {facts.num_gpus} GPU(s) here with NCCL, and a CPU engine has none"
        remedy = 'Use engine.device=auto, or hide the GPUs from the whole job: CUDA_VISIBLE_DEVICES=""'
        yield Refusal("engine.device", "cpu", rule, remedy)
    elif facts.num_gpus > 0:
        yield from _check_gpu_count(engine, facts)


def _check_gpu_count(engine: EngineConfig, facts: LaunchFacts) -> Iterator[Refusal]:
    needed = facts.local_world_size + engine.count * engine.tp
    if needed > facts.num_gpus:
        rule = (
            f"{engine.count} engine(s) of {engine.tp} GPU(s) beside {facts.local_world_size} trainer rank(s) need "
            f"{needed} GPUs on a node and {facts.num_gpus} are visible; trainer and engine cannot share one"
        )
        yield Refusal("engine.count", engine.count, rule, "Start fewer ranks, or lower engine.count or engine.tp")


def _taken_over(engine: EngineConfig, error: ValueError) -> Refusal:
    values = {
        "engine.quantization": engine.quantization,
        "engine.extra_args": engine.extra_args,
        "engine.max_total_tokens": engine.max_total_tokens,
    }
    key = next((key for key in values if str(error).startswith(key)), "engine.dtype")
    return Refusal.from_error(key, values.get(key, engine.dtype), error)
