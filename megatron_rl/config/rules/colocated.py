"""Rules about engines that share their GPUs with the trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from sglang_bridge.settings import server_device

_KEY = "engine.colocated"
# Torch reads both
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The run sets these, from the memory that the trainer leaves
_PLANNED_OPTIONS = ("--mem-fraction-static", "--enable-memory-saver")


def check_colocated(c: Configuration, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield broken rules about `engine.colocated` and `sync.transport=ipc`."""
    on_gpu = server_device(facts.num_gpus) == "cuda"
    if c.sync.transport == "ipc":
        yield from _check_transport(c, on_gpu=on_gpu)
    if not c.engine.colocated:
        return
    yield from _check_turns(c)
    yield from _check_options(c)
    if on_gpu and c.engine.mode == "managed":
        yield from _check_gpus(c, facts)


def _check_transport(c: Configuration, *, on_gpu: bool) -> Iterator[BrokenRule]:
    key = "sync.transport"
    if not c.engine.colocated:
        rule = f"It hands weights over on a GPU that both sides use, and {_KEY} is false"
        yield BrokenRule(key, rule, f"Use {key}=distributed, or {_KEY}=true")
    elif not on_gpu:
        rule = "It hands weights over in the memory of a GPU, and the engines run on CPUs"
        yield BrokenRule(key, rule, f"Use {key}=distributed")
    if c.engine.quantization is not None:
        rule = (
            f"With {key}=ipc SGLang processes quantized weights once more after each update, and "
            "hides errors of it"
        )
        yield BrokenRule("engine.quantization", rule, f"Use null, or {_KEY}=false")


def _check_turns(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about who works when."""
    if c.mode != "train":
        rule = f"Only mode=train has a trainer and engines that take turns, and mode={c.mode}"
        yield BrokenRule(_KEY, rule, f"Use {_KEY}=false")
    if c.rollout.max_staleness:
        rule = f"No engine samples while the trainer has the devices, and {_KEY} is true"
        remedy = f"Use rollout.max_staleness=0, or {_KEY}=false"
        yield BrokenRule("rollout.max_staleness", rule, remedy)
    if c.engine.nodes_per_engine > 1:
        rule = f"An engine shares the devices of the ranks of one node, and {_KEY} is true"
        remedy = f"Use engine.nodes_per_engine=1, or {_KEY}=false"
        yield BrokenRule("engine.nodes_per_engine", rule, remedy)
    if c.environment.name == "demonstration":
        rule = (
            "Engines get weights for evaluations alone, and one that slept has lost its weights: "
            f"{_KEY}=true needs a sync in each step"
        )
        yield BrokenRule("environment.name", rule, f"Use {_KEY}=false, or another environment")


def _check_options(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about options that the run sets itself."""
    for argument in c.engine.extra_args:
        option = argument.split("=", 1)[0]
        if len(option) > len("--") and any(name.startswith(option) for name in _PLANNED_OPTIONS):
            rule = f"It has {option}, and with {_KEY}=true the run plans the memory of engines"
            yield BrokenRule("engine.extra_args", rule, f"Remove {option}")


def _check_gpus(c: Configuration, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield broken rules about the GPUs of a node and about their memory."""
    ranks = facts.local_world_size
    if ranks > facts.num_gpus:
        rule = f"{ranks} rank(s) of a node need one GPU each, and {facts.num_gpus} are visible"
        remedy = f"Start {facts.num_gpus} rank(s) (torchrun --nproc-per-node {facts.num_gpus})"
        yield BrokenRule(_KEY, rule, remedy)
    elif c.engine.count * c.engine.tp != ranks:
        rule = (
            f"The engines of a node use the GPUs of its {ranks} rank(s), and engine.count="
            f"{c.engine.count} x engine.tp={c.engine.tp} need {c.engine.count * c.engine.tp}"
        )
        remedy = f"Give sizes whose product is {ranks}, such as engine.count={ranks} engine.tp=1"
        yield BrokenRule("engine.count", rule, remedy)
    if c.sync.transport != "ipc":
        rule = (
            f"With {_KEY}=true an engine and a rank share a GPU, and NCCL forms no group of two "
            "processes on one GPU"
        )
        yield BrokenRule("sync.transport", rule, f"Use sync.transport=ipc, or {_KEY}=false")
    yield from _check_allocator()


def _check_allocator() -> Iterator[BrokenRule]:
    """Yield broken rules about memory that another process cannot open."""
    for name in _ALLOCATORS:
        options = os.environ.get(name, "").lower().replace(" ", "")
        if "expandable_segments:true" in options:
            rule = (
                f"{name} has expandable_segments, whose memory SGLang's side of "
                "sync.transport=ipc cannot open"
            )
            remedy = f"Remove expandable_segments from {name}"
            yield BrokenRule("sync.transport", rule, remedy)
