"""Rules of trainer and engines on one machine: devices, number formats, timeouts, addresses, and
the run's directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration, EngineSettings, ModelSettings, RunSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.paths import new_directory_problem
from megatron_rl.contracts.refusal import Refusal
from megatron_rl.models.shape import ModelShape
from sglang_bridge.addresses import repeated_url_refusals, url_refusal
from sglang_bridge.keys import key_file_refusal
from sglang_bridge.settings import (
    kv_cache_slots,
    server_device,
    server_refusals,
)

# Settings for starting a server, which is not done with engine.urls.
_START_SETTINGS = (
    "count",
    "colocated",
    "nodes_per_engine",
    "max_total_tokens",
    "extra_args",
)
_ALL_ON_CPU = 'run everything on the CPU: CUDA_VISIBLE_DEVICES=""'


def check_formats_and_timeouts(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about timeouts of collectives, and about number formats of the engines."""
    for key in ("engine.start_timeout_s", "sync.timeout_s"):
        if attrgetter(key)(c) >= c.parallel.timeout_s:
            rule = (
                "The other ranks wait in a collective meanwhile, and give up after "
                f"parallel.timeout_s={c.parallel.timeout_s:g}"
            )
            yield BrokenRule(key, rule, "Lower it, or raise parallel.timeout_s above it")
    if c.engine.dtype == "float32" and c.model.dtype == "bfloat16":
        rule = (
            "It is wider than model.dtype=bfloat16: rollouts would follow another policy than the "
            "one that is trained"
        )
        yield BrokenRule("engine.dtype", rule, "Use engine.dtype=bfloat16")


def check_layer_spec(model: ModelSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield broken rules about Transformer Engine's modules and its FP8."""
    yield from _check_transformer_engine(model, facts)
    obstacle = _transformer_engine_obstacle(facts)
    if model.spec == "te" and obstacle:
        rule = f"Transformer Engine's modules run only on CUDA devices. {obstacle}"
        yield BrokenRule("model.spec", rule, "Use model.spec=local")
    elif model.spec == "te" and model.dtype == "float32":
        rule = "Transformer Engine has no attention over packed sequences in float32"
        yield BrokenRule("model.spec", rule, "Use model.spec=local, or model.dtype=bfloat16")
    if model.fp8 is not None and (obstacle or model.spec == "local" or model.dtype == "float32"):
        reason = obstacle or "Here model.spec is local"
        rule = f"FP8 matrix products need model.spec=te and model.dtype=bfloat16. {reason}"
        yield BrokenRule("model.fp8", rule, "Leave it null, which trains in model.dtype")


def _check_transformer_engine(model: ModelSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield a broken rule if the default spec would be Transformer Engine's and it is broken."""
    error = facts.transformer_engine_error
    if facts.num_gpus and error and model.spec is None and model.dtype != "float32":
        rule = f"Transformer Engine is installed here and cannot be imported: {error}"
        remedy = "Install one that is built for this torch, or use model.spec=local"
        yield BrokenRule("model.spec", rule, remedy)


def _transformer_engine_obstacle(facts: LaunchFacts) -> str:
    """Return why Transformer Engine cannot run here; empty if it can."""
    if facts.num_gpus == 0:
        return _no_gpu_reason(facts)
    if facts.transformer_engine_error:
        return f"It cannot be imported here: {facts.transformer_engine_error}"
    return "" if facts.transformer_engine else "It is not installed here"


def check_sequence_length(
    c: Configuration, shape: ModelShape, facts: LaunchFacts
) -> Iterator[BrokenRule]:
    """Yield broken rules about the longest sequence: the model's positions and the KV cache."""
    prompt = c.data.max_prompt_tokens
    response = c.rollout.max_new_tokens
    positions = shape.max_position_embeddings
    # SGLang keeps two positions of a sequence and seven behind a prompt free. Beyond these limits
    # it truncates or refuses requests.
    longest = max(prompt + response + 2, prompt + 7)
    total = (
        f"data.max_prompt_tokens={prompt} + rollout.max_new_tokens={response} and the positions "
        "that SGLang keeps free"
    )
    if longest > positions:
        rule = f"{total} exceed the model's {positions} positions"
        yield BrokenRule("rollout.max_new_tokens", rule, "Lower one of the two")
    for key, limit in c.eval.longest_responses.items():
        if prompt + limit + 2 > positions:
            rule = (
                f"{key}: data.max_prompt_tokens={prompt} + {limit} new tokens and the positions "
                f"that SGLang keeps free exceed the model's {positions} positions"
            )
            yield BrokenRule(".".join(key.split(".")[:2]), rule, "Lower one of the two")
    response = max(response, *c.eval.longest_responses.values(), 0)
    longest = max(prompt + response + 2, prompt + 7)
    slots = kv_cache_slots(c.engine, server_device(facts.num_gpus))
    if c.engine.mode == "managed" and slots is not None and slots < longest:
        rule = f"One sequence may take {longest} slots ({total})"
        yield BrokenRule("engine.max_total_tokens", rule, f"Give at least {longest}")


def check_engine(engine: EngineSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield broken rules about the start of engines, their addresses and their devices."""
    if engine.tp % engine.ep:
        rule = (
            "SGLang spreads experts over the ranks of one engine, so this must divide "
            f"engine.tp={engine.tp}"
        )
        yield BrokenRule("engine.ep", rule, "Use a divisor of engine.tp")
    if engine.mode == "external":
        yield from _check_external(engine)
    else:
        yield from _check_managed(engine, facts)
    yield from _check_gpus(engine, facts)


def _check_external(engine: EngineSettings) -> Iterator[BrokenRule]:
    if engine.urls_file is not None and "://" in str(engine.urls):
        rule = "Without brackets it is a file with one URL a line, and not an address"
        yield BrokenRule("engine.urls", rule, f"Use engine.urls=[{engine.urls}]")
    for refusal in (
        *filter(None, map(url_refusal, engine.url_list)),
        *repeated_url_refusals(engine.url_list),
    ):
        yield BrokenRule(refusal.key, f"{refusal.rule} ({refusal.value})", refusal.remedy)
    if engine.key_file is not None:
        problem = key_file_refusal(Path(engine.key_file))
        if problem is not None:
            yield _from_refusal(problem)
    for name in _START_SETTINGS:
        if getattr(engine, name) != getattr(EngineSettings(), name):
            rule = "This is for starting a server, and external servers are already running"
            remedy = "Remove it and set it where the server is started, or remove engine.urls"
            yield BrokenRule(f"engine.{name}", rule, remedy)


def _check_managed(engine: EngineSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    if engine.key_file is not None:
        rule = "Without engine.urls the run starts its own servers, with random keys"
        yield BrokenRule("engine.key_file", rule, "Remove it, or give engine.urls")
    yield from _check_nodes(engine, facts)
    for refusal in server_refusals(engine, server_device(facts.num_gpus)):
        yield _from_refusal(refusal)
    if engine.ep > 1 and server_device(facts.num_gpus) == "cpu":
        rule = "SGLang's experts for CPUs (0.5.23) compute with all experts on every rank"
        yield BrokenRule("engine.ep", rule, "Use 1, which splits each expert over engine.tp")


def _check_nodes(engine: EngineSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield broken rules about engines over several nodes."""
    num_nodes = facts.world_size // facts.local_world_size
    if num_nodes % engine.nodes_per_engine:
        rule = (
            f"The {num_nodes} node(s) of this run form groups of so many nodes, and each group "
            "shares its engines"
        )
        remedy = "Use a divisor of the number of nodes, or start torchrun on more nodes (--nnodes)"
        yield BrokenRule("engine.nodes_per_engine", rule, remedy)
    if engine.tp % engine.nodes_per_engine:
        rule = f"Each node holds an equal part of the engine.tp={engine.tp} ranks of an engine"
        yield BrokenRule("engine.nodes_per_engine", rule, "Use a divisor of engine.tp")


def _from_refusal(refusal: Refusal) -> BrokenRule:
    return BrokenRule(refusal.key, refusal.rule, refusal.remedy)


def _no_gpu_reason(facts: LaunchFacts) -> str:
    if facts.idle_gpus:
        return (
            f"The installed torch is built for CPUs and cannot use the {facts.idle_gpus} GPU(s) "
            "here"
        )
    return "No CUDA device is visible here"


def _check_gpus(engine: EngineSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield a broken rule unless each rank and each process of a managed engine has its own GPU."""
    if engine.colocated:
        return  # see colocated.py
    ranks = facts.local_world_size
    ranks_of_engine = engine.tp // engine.nodes_per_engine
    engines = engine.count * ranks_of_engine if engine.mode == "managed" else 0
    if not 0 < facts.num_gpus < ranks + engines:
        return
    if engine.mode == "managed" and ranks_of_engine > facts.num_gpus:
        rule = (
            f"An engine has {ranks_of_engine} of its ranks on each node "
            f"(engine.nodes_per_engine={engine.nodes_per_engine}), and {facts.num_gpus} GPU(s) "
            "are visible here"
        )
        remedy = (
            "Lower it, or raise engine.nodes_per_engine, which lets several nodes of the run share "
            "an engine"
        )
        yield BrokenRule("engine.tp", rule, remedy)
        return
    free_gpus = facts.num_gpus - engines
    if free_gpus > 0:
        way = f"Start at most {free_gpus} rank(s) (torchrun --nproc-per-node {free_gpus})"
    elif engines > 1:
        way = "Lower engine.count or engine.tp, or raise engine.nodes_per_engine"
    else:
        way = "Use engine=external, with engines elsewhere"
    rule = (
        f"{ranks} trainer rank(s) and {engines} engine process(es) of a node need one GPU each, "
        f"and {facts.num_gpus} are visible"
    )
    key = "engine.count" if engines else "engine.urls"
    yield BrokenRule(key, rule, f"{way}, or {_ALL_ON_CPU}")


def check_run(run: RunSettings) -> Iterator[BrokenRule]:
    """Yield broken rules about the run's directory: it can be created and does not exist yet."""
    root = Path(run.root)
    if problem := new_directory_problem(run.root):
        remedy = "Give a directory, or a path where one can be created, such as run.root=runs"
        yield BrokenRule("run.root", problem, remedy)
    elif run.name is not None and _must_be_new(run) and (root.expanduser() / run.name).exists():
        rule = f"{root / run.name} exists already, and two runs never share a directory"
        remedy = (
            "Choose another name, move the old run away, resume it with run.resume=auto, or, if it "
            "failed, replace it with run.on_existing=overwrite_failed"
        )
        yield BrokenRule("run.name", rule, remedy)


def _must_be_new(run: RunSettings) -> bool:
    return run.on_existing == "refuse" and run.resume != "auto"
