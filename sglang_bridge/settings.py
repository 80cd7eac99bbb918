"""Settings with which a server is started, and settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le

from sglang_bridge.refusal import Refusal

DEFAULT_KEEP_ALIVE_SECONDS = 5
"""The seconds after which SGLang closes an idle connection by default."""
MANAGED_KEEP_ALIVE_SECONDS = 120
"""The same for a server that the bridge starts."""
# Options that the bridge sets itself.
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
    "--json-model-override-args",
)
# Weights arrive with plain float32 scales, and a kernel may repack both for itself at the start.
_OTHER_LAYOUT = (
    "its kernel may hold FP8 weights in a layout of its own, which later weights do not follow"
)
_SEVERAL_NODES = (
    "the run gives it to the servers of an engine over several nodes (engine.nodes_per_engine)"
)
_OTHER_NCCL = "it changes NCCL's settings on the engine's side only"
# Routes keep the checkpoint's expert ids, but weights and their audit follow the physical places.
_OTHER_PLACES = (
    "it copies or moves experts, and weights sent under the checkpoint's ids do not follow them"
)
# Unsupported options, by the reason. They break what the bridge relies on: recorded routes, one
# replica, private keys. The reasons hold for SGLang 0.5.23, which records routes before it maps
# experts to physical places.
_UNSUPPORTED = {
    _SEVERAL_NODES: ("--nnodes", "--node-rank", "--dist-init-addr"),
    "": (
        "--pp-size",
        "--pipeline-parallel-size",
        "--dp-size",
        "--dp",
        "--data-parallel-size",
        "--context-length",
        "--load-format",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--tokenizer-worker-num",  # SGLang refuses it together with keys
    ),
    _OTHER_NCCL: (
        "--enable-symm-mem",
        "--enable-nccl-nvls",
    ),
    _OTHER_LAYOUT: ("--fp8-gemm-backend",),
    _OTHER_PLACES: (
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
    "ranks then route different tokens, and SGLang returns the record of one rank for all": (
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
    "it runs two batches at once, and one overwrites the other's routes": (
        "--enable-two-batch-overlap",
        "--enable-pdmux",
    ),
    "the record of routes has no room for draft tokens": ("--speculative-algorithm",),
    "its streamed replies would lack their first token": ("--incremental-streaming-output",),
    "tokens whose keys and values come from elsewhere get the routes of other tokens": (
        "--enable-hierarchical-cache",
        "--enable-lmcache",
        "--enable-flexkv",
        "--radix-cache-backend",
        "--enable-unified-cache-external-linker",
        "--disaggregation-mode",
    ),
    "some of its choices do not record the experts": (
        "--moe-runner-backend",
        "--model-impl",
    ),
}
# Values in `/server_info` that stand for an option that is not set, besides False.
_UNSET = (None, 0, 1, "", "none", "null", "auto", "trivial", "sglang")
_CPU_SLOTS = 16384


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server that users choose.

    max_total_tokens: KV-cache slots. Comments mark settings that apply only to servers which the
    run starts itself ("managed").
    """

    # external: each engine has the sizes that it reports, and these serve for estimates alone
    tp: Annotated[int, Ge(1), Le(1024)] = 1
    ep: Annotated[int, Ge(1), Le(1024)] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    # fp8: the matrices of attention, MLPs and experts are held in 8 bits, with a scale for each
    # block of 128 x 128 weights. The trainer quantizes them before it sends them.
    quantization: Literal["fp8"] | None = None
    # quantization=fp8 only: layers at either end that are held in `dtype`
    unquantized_first_layers: Annotated[int, Ge(0), Le(10**6)] = 0
    unquantized_last_layers: Annotated[int, Ge(0), Le(10**6)] = 0
    # also limits the requests in flight
    max_running_requests: Annotated[int, Ge(1), Le(10**6)] = 256
    # managed only; null: 16384 on CPUs, as many as fit on GPUs
    max_total_tokens: Annotated[int, Ge(1), Le(2**31 - 1)] | None = None
    start_timeout_s: Annotated[float, Gt(0), Le(10**6)] = 180.0  # less than parallel.timeout_s
    request_timeout_s: Annotated[float, Gt(0), Le(10**6)] = 120.0
    extra_args: list[str] = field(default_factory=list)  # managed only


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """The model, device and address of one server, which the run decides.

    node: the host whose collector sends requests to it. port: the preferred port; with None, or if
    it is in use, the server gets a free one. gpus: indices into the devices that this process may
    see. load_format: "dummy" starts with random weights of the correct shapes, None reads the
    checkpoint in `model_path`. quantization: a `quantization_config` for the model; such a server
    starts with random weights. seed: the server's sampling seed; with None, SGLang chooses one.
    memory_fraction: the share of its GPUs for weights and KV cache of an engine that can sleep;
    None for one that cannot.
    num_servers: the servers of its engine, one on each node. server_rank: this one's number among
    them. The first one answers requests.
    """

    model_path: str
    device: Literal["cpu", "cuda"]
    host: str = "127.0.0.1"
    port: int | None = None
    node: int = 0
    gpus: tuple[int, ...] = ()
    return_routes: bool = True
    load_format: Literal["dummy"] | None = None
    quantization: Mapping[str, Any] | None = None
    seed: int | None = None
    memory_fraction: float | None = None
    num_servers: int = 1
    server_rank: int = 0


def server_device(num_gpus: int) -> Literal["cpu", "cuda"]:
    """The device of a server on a machine with `num_gpus` usable GPUs, as for the trainer."""
    return "cuda" if num_gpus > 0 else "cpu"


def kv_cache_slots(settings: ServerSettings, device: Literal["cpu", "cuda"]) -> int | None:
    """The number of tokens in the KV cache; None means as many as SGLang finds memory for."""
    if settings.max_total_tokens is None and device == "cpu":
        # SGLang would take a share of the host's memory, which the trainer needs.
        return _CPU_SLOTS
    return settings.max_total_tokens


def server_refusals(settings: ServerSettings, device: Literal["cpu", "cuda"]) -> Iterator[Refusal]:
    """Refuse settings with which no server can be started on this device."""
    if device == "cuda" and settings.dtype == "float32":
        rule = "SGLang's attention and norm kernels for GPUs take 16-bit numbers only"
        remedy = (
            "Use model.dtype=bfloat16, which it follows, or run everything on the CPU: "
            'CUDA_VISIBLE_DEVICES=""'
        )
        yield Refusal("engine.dtype", settings.dtype, rule, remedy)
    for argument in settings.extra_args:
        option = argument.split("=", 1)[0]
        refusal = _option_refusal(option)
        if refusal is not None:
            rule, remedy = refusal
            yield Refusal("engine.extra_args", settings.extra_args, rule, remedy)


def named_options() -> tuple[str, ...]:
    """The options of SGLang that these rules name."""
    return (*_RESERVED, *(name for names in _UNSUPPORTED.values() for name in names))


class RunningOption(NamedTuple):
    """An unsupported option with which a server runs, such as `--enable-eplb`.

    harms_routes: False if it harms the weights.
    """

    name: str
    value: Any
    reason: str
    harms_routes: bool


def unsupported_options(info: Mapping[str, Any]) -> Iterator[RunningOption]:
    """Yield the unsupported options of a server that somebody else started.

    These options are not among them: options that concern its start, NCCL's settings, which may
    equal the trainer's, and the runner of experts, because some runners record routes.

    info: the server's `/server_info`, which holds the value of every option.
    """
    for reason, names in _UNSUPPORTED.items():
        if reason in ("", _SEVERAL_NODES, _OTHER_NCCL, _OTHER_LAYOUT):
            continue
        for name in names:
            value = info.get(name.removeprefix("--").replace("-", "_"))
            is_set = value is True or (value is not False and value not in _UNSET)
            if is_set and name != "--moe-runner-backend":
                yield RunningOption(name, value, reason, harms_routes=reason != _OTHER_PLACES)


def _option_refusal(option: str) -> tuple[str, str] | None:
    """The rule and remedy for an option that cannot be used; None if it can."""
    if not option.strip():
        return "It has an empty argument", "Remove it"
    if _is_among(option, _RESERVED):
        return f"It has {option}, which has its own setting", "Remove it and use that setting"
    for reason, names in _UNSUPPORTED.items():
        if _is_among(option, names):
            explanation = f": {reason}" if reason else ""
            return f"It has {option}, which is not supported{explanation}", f"Remove {option}"
    return None


def _is_among(option: str, names: tuple[str, ...]) -> bool:
    """True for one of `names`, and for an abbreviation that SGLang's parser would expand to one."""
    return option.startswith("--") and any(name.startswith(option) for name in names)
