"""What a managed engine is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt

_DTYPES = ("float32", "bfloat16", "float16")
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
class EngineSettings:
    """One engine. max_total_tokens: KV-cache slots, None lets SGLang size it from free memory (GPU only).

    threads: OpenMP threads of each of its processes. extra_args: passed to SGLang as they are.
    """

    model_path: str
    dtype: str
    device: Literal["cpu", "cuda"]
    max_running_requests: int
    max_total_tokens: int | None
    tp: int = 1
    ep: int = 1
    threads: int = 1
    host: str = "127.0.0.1"
    port: int | None = None
    quantization: str | None = None
    return_routes: bool = True
    gpus: tuple[int, ...] = ()
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"engine.dtype={self.dtype!r}: one of {', '.join(_DTYPES)} (SGLang's 'auto' turns float32 into float16)"
            )
        if self.device == "cpu" and self.quantization is not None:
            raise ValueError(
                f"engine.quantization={self.quantization!r} with engine.device=cpu: SGLang's quantized kernels "
                "for CPUs need AMX; use null"
            )
        if self.device == "cpu" and self.max_total_tokens is None:
            raise ValueError("engine.max_total_tokens=null with engine.device=cpu: give the KV cache a size in tokens")
        for argument in self.extra_args:
            option = argument.split("=", 1)[0]
            if not option.strip():
                raise ValueError("engine.extra_args has an empty argument; remove it")
            if _names(option, _RESERVED):
                raise ValueError(f"engine.extra_args has {option}: it has a setting of its own; use that one")
            if _names(option, _UNSUPPORTED):
                raise ValueError(f"engine.extra_args has {option}: not supported with routes and keys; remove it")


def _names(option: str, names: tuple[str, ...]) -> bool:
    """Whether an option is one of `names`, or an abbreviation that SGLang's parser would expand to one."""
    return option.startswith("--") and any(name == option or name.startswith(option) for name in names)


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
