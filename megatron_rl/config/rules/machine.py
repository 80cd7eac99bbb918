"""Trainer and engines on one machine: sizes, number formats, timeouts, addresses and the run's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.schema import Configuration, EngineSettings, RunSettings
from megatron_rl.models.shape import ModelShape
from sglang_bridge.addresses import repeated_urls, url_problem
from sglang_bridge.keys import key_file_problem
from sglang_bridge.settings import refusals

_FP8_BLOCK = 128
_FOR_A_START = ("count", "device", "max_total_tokens", "threads", "start_timeout_s", "extra_args")


def check_parallel(c: Configuration, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    """Megatron's grid, what is not built yet, timeouts and number formats."""
    tp, ep = c.parallel.tp, c.parallel.etp * c.parallel.ep
    for key, size, name in (("parallel.tp", tp, "parallel.tp"), ("parallel.ep", ep, "parallel.etp x ep")):
        if facts.world_size % size:
            rule = f"{name} = {size} does not divide the {facts.world_size} rank(s) of this job"
            yield key, rule, f"Start a multiple of {size} ranks (torchrun --nproc-per-node {size}), or lower it"
    if c.parallel.pp > 1:
        yield "parallel.pp", "Weights of several pipeline stages cannot be sent to engines yet", "Use parallel.pp=1"
    if (c.parallel.vpp or 1) > 1:
        yield "parallel.vpp", "Virtual stages interleave pipeline stages, of which there is only one", "Leave it null"
    if c.parallel.cp > 1:
        yield "parallel.cp", "Batches are not split over context-parallel ranks yet", "Use parallel.cp=1"
    if c.parallel.sequence_parallel != (tp > 1):
        rule = f"In MoE layers sequence parallelism and tensor parallelism come together, and parallel.tp={tp}"
        yield "parallel.sequence_parallel", rule, f"Use {str(tp > 1).lower()}, or change parallel.tp"
    starts = {"engine.start_timeout_s": c.engine.start_timeout_s} if c.engine.mode == "managed" else {}
    for key, seconds in (starts | {"sync.timeout_s": c.sync.timeout_s}).items():
        if seconds >= c.parallel.timeout_s:
            rule = f"The other ranks wait in a collective and give up after parallel.timeout_s={c.parallel.timeout_s:g}"
            yield key, rule, "Lower it, or raise parallel.timeout_s above it"
    if facts.num_gpus == 0 and c.model.dtype != "float32":
        yield "model.dtype", "Without a GPU only float32 is trained", "Use model.dtype=float32"
    if c.engine.dtype == "float32" and c.model.dtype == "bfloat16":
        rule = "It is wider than model.dtype=bfloat16: rollouts would follow another policy than the one trained"
        yield "engine.dtype", rule, "Use engine.dtype=bfloat16"


def check_fit(c: Configuration, shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    """Every part of the model divides evenly among those that share it, and the longest sequence fits everywhere."""
    for key, size, part, count in (
        ("parallel.ep", c.parallel.ep, "expert", shape.num_experts),
        ("parallel.etp", c.parallel.etp, "column of an expert's hidden layer", shape.moe_ffn_hidden_size),
        ("parallel.tp", c.parallel.tp, "attention head", shape.num_attention_heads),
        ("parallel.tp", c.parallel.tp, "key-value head", shape.num_key_value_heads),
        ("engine.ep", c.engine.ep, "expert", shape.num_experts),
        ("engine.tp", c.engine.tp, "attention head", shape.num_attention_heads),
    ):
        if count % size:
            yield key, f"The model's {count} {part}s cannot be split evenly over {size}", f"Use a divisor of {count}"
    width = shape.moe_ffn_hidden_size * c.engine.ep // c.engine.tp
    if c.engine.quantization == "fp8" and width % _FP8_BLOCK:
        rule = f"Each engine rank gets {width} columns of an expert, which blocks of {_FP8_BLOCK} do not divide"
        yield "engine.quantization", rule, "Spread whole experts instead: engine.ep=${engine.tp}"
    prompt, new, positions = c.data.max_prompt_tokens, c.rollout.max_new_tokens, shape.max_position_embeddings
    # SGLang keeps two positions of a sequence and seven behind a prompt: beyond, it truncates or refuses requests.
    longest = max(prompt + new + 2, prompt + 7)
    said = f"data.max_prompt_tokens={prompt} + rollout.max_new_tokens={new} and what SGLang keeps free"
    if longest > positions:
        yield "rollout.max_new_tokens", f"{said} exceed the model's {positions} positions", "Lower one of the two"
    if c.engine.mode == "managed" and c.engine.max_total_tokens < longest:
        yield "engine.max_total_tokens", f"One sequence may take {longest} slots ({said})", f"Give at least {longest}"


def check_engine(engine: EngineSettings, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    """Who starts the engines, where they listen, and what they are started with."""
    if engine.tp % engine.ep:
        rule = f"SGLang spreads experts over the ranks of one engine: it must divide engine.tp={engine.tp}"
        yield "engine.ep", rule, "Use a divisor of engine.tp"
    yield from _check_external(engine) if engine.mode == "external" else _check_managed(engine, facts)


def _check_external(engine: EngineSettings) -> Iterator[tuple[str, str, str]]:
    if not engine.urls:
        rule = "engine.mode=external needs the addresses of running servers"
        yield "engine.urls", rule, "Give them: engine.urls=[http://10.0.0.7:30000], or use engine=managed"
    for problem in (*filter(None, map(url_problem, engine.urls)), *repeated_urls(engine.urls)):
        yield problem.key, f"{problem.rule} ({problem.value})", problem.remedy
    if engine.key_file is not None and (found := key_file_problem(Path(engine.key_file))):
        yield found.key, found.rule, found.remedy
    for name in _FOR_A_START:
        if getattr(engine, name) != getattr(EngineSettings(), name):
            rule = "It is for starting a server, and external ones run already"
            yield f"engine.{name}", rule, "Remove it and set it where the server is started, or use engine=managed"


def _check_managed(engine: EngineSettings, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    for name in ("urls", "key_file"):
        if getattr(engine, name):
            rule = "engine.mode=managed starts its own servers on free ports with random keys"
            yield f"engine.{name}", rule, "Remove it, or use engine=external"
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and facts.num_gpus > 0)
    for problem in refusals(engine, "cuda" if on_gpu else "cpu"):
        yield problem.key, problem.rule, problem.remedy
    # Trainer and engines share one process group for weights: NCCL on GPUs, gloo without, never one of each.
    ranks, needed = facts.local_world_size, facts.local_world_size + engine.count * engine.tp
    if facts.num_gpus == 0 and engine.device == "cuda":
        yield "engine.device", "No CUDA device is visible here", "Use engine.device=auto"
    elif facts.num_gpus > 0 and engine.device == "cpu":
        rule = f"The trainer sends weights from the {facts.num_gpus} GPU(s) here with NCCL, and a CPU engine has none"
        yield "engine.device", rule, 'Use auto, or hide the GPUs from the whole job: CUDA_VISIBLE_DEVICES=""'
    elif needed > facts.num_gpus > 0:
        rule = f"Engines share no GPU with {ranks} trainer rank(s): {needed} needed on a node, {facts.num_gpus} visible"
        yield "engine.count", rule, "Start fewer ranks, or lower engine.count or engine.tp"


def check_run(run: RunSettings) -> Iterator[tuple[str, str, str]]:
    """The run's directory can be made: the root can hold directories, and the name is not taken."""
    root = Path(run.root).expanduser()
    blocking = next((parent for parent in (root, *root.parents) if parent.exists()), Path())
    if not run.root:
        yield "run.root", "It names no directory", "Give one, such as run.root=runs"
    elif not blocking.is_dir():
        yield "run.root", f"{blocking} is a file", "Give a directory, or a path to make one at"
    elif not os.access(blocking, os.W_OK | os.X_OK):
        yield "run.root", f"{blocking} is not writable for this user", "Give another directory"
    elif run.name is not None and (root / run.name).exists():
        rule = f"{root / run.name} exists already, and two runs never share a directory"
        yield "run.name", rule, "Choose another name, or move the old run away"
