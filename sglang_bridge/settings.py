"""What a server is started with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from sglang_bridge.problem import Problem

# Options the bridge sets itself, or that break what it relies on (recorded routes, one replica, private keys).
_RESERVED = (
    "--api-key",
    "--admin-api-key",
    "--config",
    "--model-path",
    "--host",
    "--port",
    "--dtype",
    "--device",
    "--tp-size",
    "--tp",
    "--tensor-parallel-size",
    "--ep-size",
    "--ep",
    "--expert-parallel-size",
    "--max-total-tokens",
    "--max-running-requests",
    "--quantization",
)
_UNSUPPORTED = (
    "--pp-size",
    "--pipeline-parallel-size",
    "--dp-size",
    "--dp",
    "--data-parallel-size",
    "--enable-hierarchical-cache",
    "--enable-dp-attention",
    "--nnodes",
    "--context-length",
    "--load-format",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--disaggregation-mode",
    "--speculative-algorithm",
    "--tokenizer-worker-num",  # SGLang refuses it together with keys
)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a user sets for a server. max_total_tokens: KV-cache slots. threads: OpenMP threads of each process."""

    tp: Annotated[int, Ge(1)] = 1
    ep: Annotated[int, Ge(1)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"  # managed only; the trainer's: GPUs where there are
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: str | None = None
    max_running_requests: Annotated[int, Ge(1)] = 256  # bounds the requests in flight too
    max_total_tokens: Annotated[int, Ge(1)] = 16384  # managed only
    threads: Annotated[int, Ge(1)] = 1  # managed only
    start_timeout_s: Annotated[float, Gt(0)] = 180.0  # managed only; less than parallel.timeout_s
    request_timeout_s: Annotated[float, Gt(0)] = 120.0
    retries: Annotated[int, Ge(0)] = 2
    extra_args: list[str] = field(default_factory=list)  # managed only


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """What a run decides for one server: what it serves and where.

    node: the host whose collector sends it requests. port: preferred; None or a taken one gives a free one. gpus: its
    devices, counted within what this process may see. load_format: "dummy" starts with random weights of the right
    shapes, None reads the checkpoint in `model_path`.
    """

    model_path: str
    device: Literal["cpu", "cuda"]
    host: str = "127.0.0.1"
    port: int | None = None
    node: int = 0
    gpus: tuple[int, ...] = ()
    return_routes: bool = True
    load_format: Literal["dummy"] | None = None


def refusals(settings: ServerSettings, device: Literal["cpu", "cuda"]) -> Iterator[Problem]:
    """What a server on this device cannot be started with."""
    if device == "cpu" and settings.quantization is not None:
        rule = "SGLang's quantized kernels for CPUs need AMX"
        yield Problem("engine.quantization", settings.quantization, rule, "On CPU, use null")
    for argument in settings.extra_args:
        option = argument.split("=", 1)[0]
        if not option.strip():
            yield Problem("engine.extra_args", settings.extra_args, "It has an empty argument", "Remove it")
        elif _names(option, _RESERVED):
            rule = f"It has {option}, which has a setting of its own"
            yield Problem("engine.extra_args", settings.extra_args, rule, "Remove it and use that one")
        elif _names(option, _UNSUPPORTED):
            rule = f"It has {option}, which is not supported here"
            yield Problem("engine.extra_args", settings.extra_args, rule, f"Remove {option}")


def _names(option: str, names: tuple[str, ...]) -> bool:
    """Whether an option is one of `names`, or an abbreviation that SGLang's parser would expand to one."""
    return option.startswith("--") and any(name == option or name.startswith(option) for name in names)
