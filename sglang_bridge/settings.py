"""What a server is started with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from sglang_bridge.refusal import Refusal

# Options the bridge sets itself, or that break what it relies on (recorded routes, one replica,
# private keys).
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
# What is not supported, by the reason; read in SGLang 0.5.23, which records routes before experts
# are mapped to places
_UNSUPPORTED = {
    "": (
        "--pp-size",
        "--pipeline-parallel-size",
        "--dp-size",
        "--dp",
        "--data-parallel-size",
        "--nnodes",
        "--context-length",
        "--load-format",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--tokenizer-worker-num",  # SGLang refuses it together with keys
    ),
    "it changes NCCL's settings on the engine's side only": (
        "--enable-symm-mem",
        "--enable-nccl-nvls",
    ),
    # routes stay those of the checkpoint's experts there, but weights and their audit go by the
    # checkpoint's order
    "experts get copies and places of their own, which weights sent under the checkpoint's ids do not follow": (
        "--enable-eplb",
        "--ep-num-redundant-experts",
        "--init-expert-location",
        "--ep-dispatch-algorithm",
        "--elastic-ep-backend",
        "--elastic-ep-join-mode",
        "--enable-elastic-expert-backup",
        "--enable-paged-experts",
        "--kt-weight-path",
    ),
    "ranks then route different tokens, and one rank's record is taken for all": (
        "--moe-a2a-backend",
        "--enable-dp-attention",
        "--attn-dp-size",
        "--attention-data-parallel-size",
        "--attn-cp-size",
        "--attention-context-parallel-size",
        "--dcp-size",
        "--decode-context-parallel-size",
        "--moe-dp-size",
        "--moe-data-parallel-size",
        "--dwdp-size",
        "--enable-prefill-cp",
    ),
    "of two batches at a time, one overwrites the other's routes": (
        "--enable-two-batch-overlap",
        "--enable-pdmux",
    ),
    "drafted tokens have no room in the record of routes": ("--speculative-algorithm",),
    "tokens whose keys and values come from elsewhere have the routes of others": (
        "--enable-hierarchical-cache",
        "--enable-lmcache",
        "--enable-flexkv",
        "--radix-cache-backend",
        "--enable-unified-cache-external-linker",
        "--disaggregation-mode",
    ),
    "some of them route where nothing records the experts": (
        "--moe-runner-backend",
        "--model-impl",
    ),
}
_CPU_SLOTS = 16384


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a user sets for a server.

    max_total_tokens: KV-cache slots. threads: OpenMP threads of each process.
    """

    tp: Annotated[int, Ge(1), Le(1024)] = 1
    ep: Annotated[int, Ge(1), Le(1024)] = 1
    device: Literal["auto", "cpu", "cuda"] = (
        "auto"  # managed only; the trainer's: GPUs where there are
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: str | None = None
    max_running_requests: Annotated[int, Ge(1), Le(10**6)] = (
        256  # bounds the requests in flight too
    )
    # managed only; null: 16384 on CPUs, what fits on GPUs
    max_total_tokens: Annotated[int, Ge(1), Le(2**31 - 1)] | None = None
    threads: Annotated[int, Ge(1), Le(1024)] = 1  # managed only
    start_timeout_s: Annotated[float, Gt(0), Le(10**6)] = 180.0  # less than parallel.timeout_s
    request_timeout_s: Annotated[float, Gt(0), Le(10**6)] = 120.0
    retries: Annotated[int, Ge(0), Le(100)] = (
        2  # of a failed request, each a round over all engines of the node
    )
    extra_args: list[str] = field(default_factory=list)  # managed only


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """What a run decides for one server: what it serves and where.

    node: the host whose collector sends it requests. port: preferred; None or a taken one gives a
    free one. gpus: its devices, counted within what this process may see. load_format: "dummy"
    starts with random weights of the right shapes, None reads the checkpoint in `model_path`. seed:
    of its sampling; None lets SGLang draw one.
    """

    model_path: str
    device: Literal["cpu", "cuda"]
    host: str = "127.0.0.1"
    port: int | None = None
    node: int = 0
    gpus: tuple[int, ...] = ()
    return_routes: bool = True
    load_format: Literal["dummy"] | None = None
    seed: int | None = None


def device_of(settings: ServerSettings, num_gpus: int) -> Literal["cpu", "cuda"]:
    """What a server runs on where so many GPUs can be used."""
    return (
        "cuda"
        if settings.device == "cuda" or (settings.device == "auto" and num_gpus > 0)
        else "cpu"
    )


def kv_cache_slots(settings: ServerSettings, device: Literal["cpu", "cuda"]) -> int | None:
    """How many tokens a server on this device keeps in its KV cache; None: as many as SGLang finds
    memory for.
    """
    if settings.max_total_tokens is None and device == "cpu":
        return _CPU_SLOTS  # SGLang would take a share of the host's memory, which the trainer needs
    return settings.max_total_tokens


def quantization_refusals(quantization: str | None) -> Iterator[Refusal]:
    """Why a quantized server, started here or elsewhere, cannot be given weights."""
    if quantization is not None:
        rule = "Weights are sent unquantized, and a quantized server would load them without scales"
        yield Refusal(
            "engine.quantization",
            quantization,
            rule,
            "Use null, and servers started without --quantization",
        )


def server_refusals(settings: ServerSettings, device: Literal["cpu", "cuda"]) -> Iterator[Refusal]:
    """What a server on this device cannot be started with."""
    yield from quantization_refusals(settings.quantization)
    if device == "cuda" and settings.dtype == "float32":
        rule = "SGLang's attention and norm kernels for GPUs take 16-bit numbers only"
        remedy = 'Use model.dtype=bfloat16, which it follows, or run all on the CPU: CUDA_VISIBLE_DEVICES=""'
        yield Refusal("engine.dtype", settings.dtype, rule, remedy)
    for argument in settings.extra_args:
        option = argument.split("=", 1)[0]
        if not option.strip():
            yield Refusal(
                "engine.extra_args", settings.extra_args, "It has an empty argument", "Remove it"
            )
        elif _names(option, _RESERVED):
            rule = f"It has {option}, which has a setting of its own"
            yield Refusal(
                "engine.extra_args", settings.extra_args, rule, "Remove it and use that one"
            )
        else:
            for why in (why for why, names in _UNSUPPORTED.items() if _names(option, names)):
                rule = f"It has {option}, which is not supported here{why and ': '}{why}"
                yield Refusal("engine.extra_args", settings.extra_args, rule, f"Remove {option}")
                break


def _names(option: str, names: tuple[str, ...]) -> bool:
    """Whether an option is one of `names`, or an abbreviation that SGLang's parser would expand to
    one.
    """
    return option.startswith("--") and any(
        name == option or name.startswith(option) for name in names
    )
