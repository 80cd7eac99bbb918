"""Builds one rank of an engine's model from SGLang's classes, without memory, and loads it."""

from __future__ import annotations

import concurrent.futures
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.lab.engine_rehearsal.requests import RankLoad, TensorSpec
from tests.lab.engine_rehearsal.server_arguments import LogLines
from tests.lab.engine_rehearsal.transfer_log import TransferLog

# SGLang would import all of its models to find one.
_MODULES = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV3ForCausalLM": "deepseek_v2",
}


class _Group:
    """A communication group that tells ranks and sizes, and never communicates."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.unique_name = f"ranks {list(ranks)}"
        self.ranks = list(ranks)
        self.rank = rank
        self.local_rank = rank
        self.world_size = len(ranks)
        self.rank_in_group = self.ranks.index(rank)
        self.first_rank = self.ranks[0]
        self.last_rank = self.ranks[-1]
        self.is_first_rank = rank == self.first_rank
        self.is_last_rank = rank == self.last_rank
        self.cpu_group = None
        self.device_group = None


class _OneThread:
    """An executor that calls at once: a dispatch mode follows the calling thread alone."""

    def __enter__(self) -> _OneThread:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        future: Any = concurrent.futures.Future()
        future.set_result(function(*args, **options))
        return future


class _WithoutMemory(TorchFunctionMode):
    """Sends tensors that a layer creates on the GPU to the meta device too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if "cuda" in str(options.get("device")):
            options["device"] = "meta"
        return func(*args, **options)


def load_rank(arguments: Any, rank: int, specs: Sequence[TensorSpec]) -> RankLoad:
    """Build the model of one rank and load the tensors into it. arguments: resolved."""
    try:
        model = _build(arguments, rank)
    except Exception as problem:  # SGLang's layers raise anything for sizes that they cannot split
        return RankLoad(
            rank=rank, num_bytes=0, parameters=[], transfers=[], warnings=[], error=str(problem)
        )
    return _load(model, rank, specs)


def _load(model: Any, rank: int, specs: Sequence[TensorSpec]) -> RankLoad:
    log = TransferLog()
    lines = LogLines()
    executors: Any = concurrent.futures
    executor = executors.ThreadPoolExecutor
    executors.ThreadPoolExecutor = _OneThread
    logging.getLogger("sglang").addHandler(lines)
    stream = log.stream(specs)
    last = [""]

    def follow() -> Any:
        for name, tensor in stream:
            last[0] = f"{name} {list(tensor.shape)} {tensor.dtype}"
            yield name, tensor

    error = ""
    try:
        with log:
            model.load_weights(follow())
    except Exception as problem:  # SGLang's loaders assert, and raise anything
        error = f"{last[0]}: {type(problem).__name__}: {str(problem).strip()[:300]}"
    finally:
        executors.ThreadPoolExecutor = executor
        logging.getLogger("sglang").removeHandler(lines)
    return RankLoad(
        rank=rank,
        num_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        parameters=log.parameters(model),
        transfers=log.transfers(model),
        warnings=lines.warnings,
        error=error,
    )


def _build(arguments: Any, rank: int) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.models.registry import ModelRegistry

    _publish(arguments, rank)
    config = model_config_of(arguments)
    for architecture in config.hf_config.architectures:
        module = importlib.import_module(f"sglang.srt.models.{_MODULES[architecture]}")
        ModelRegistry.models.setdefault(architecture, getattr(module, architecture))
    load_config = LoadConfig()
    quantization = loader._get_quantization_config(config, load_config)
    with set_default_torch_dtype(config.dtype), torch.device("meta"), _WithoutMemory():
        model: Any = loader._initialize_model(config, load_config, quantization)
    # It computes with the values of weights.
    if hasattr(model, "post_load_weights"):
        model.post_load_weights = lambda *_, **__: None
    return model


def _publish(arguments: Any, rank: int) -> None:
    """Tell SGLang's layers the arguments and the place of the rank."""
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish

    publish(arguments, role="test", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    parallel = get_parallel()
    tp = parallel.tp_size
    expert_shards = tp // parallel.moe_ep_size
    everyone = range(tp)
    alone = [rank]
    attention = rank // parallel.attn_tp_size * parallel.attn_tp_size
    expert = rank // expert_shards * expert_shards
    parallel.override_permanently(
        world_group=_Group(everyone, rank),
        tp_group=_Group(everyone, rank),
        pp_group=_Group(alone, rank),
        attn_cp_group=_Group(alone, rank),
        attn_tp_group=_Group(range(attention, attention + parallel.attn_tp_size), rank),
        moe_ep_group=_Group(range(rank % expert_shards, tp, expert_shards), rank),
        moe_tp_group=_Group(range(expert, expert + expert_shards), rank),
    )
