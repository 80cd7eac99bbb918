"""Trainer and engines on one machine: number formats, timeouts, addresses and the run's directory."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from megatron_rl.config.schema import Configuration, EngineSettings, ModelSettings, RunSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.paths import new_directory_problem
from megatron_rl.models.shape import ModelShape
from sglang_bridge.addresses import repeated_url_refusals, url_refusal
from sglang_bridge.keys import key_file_refusal
from sglang_bridge.settings import device_of, kv_cache_slots, quantization_refusals, server_refusals

_FOR_A_START = ("count", "device", "max_total_tokens", "threads", "extra_args")


def check_ranks(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """How long ranks wait for one another, and number formats, real and simulated."""
    for key in ("engine.start_timeout_s", "sync.timeout_s"):
        if attrgetter(key)(c) >= c.parallel.timeout_s:
            rule = f"The other ranks wait in a collective and give up after parallel.timeout_s={c.parallel.timeout_s:g}"
            yield key, rule, "Lower it, or raise parallel.timeout_s above it"
    if c.engine.fake_quant == "bf16" and c.engine.dtype == "bfloat16":
        yield (
            "engine.fake_quant",
            "engine.dtype=bfloat16 rounds weights so anyway",
            "Use off, or engine.dtype=float32",
        )
    if c.engine.fake_quant != "off" and c.mode in ("eval", "profile") and c.run.resume == "never":
        rule = f"Without a checkpoint mode={c.mode} sends no weights, and engines serve model.path as it is"
        yield "engine.fake_quant", rule, "Use off, or give a checkpoint: run.resume=runs/NAME"
    if c.engine.dtype == "float32" and c.model.dtype == "bfloat16":
        rule = "It is wider than model.dtype=bfloat16: rollouts would follow another policy than the one trained"
        yield "engine.dtype", rule, "Use engine.dtype=bfloat16"


def check_spec(model: ModelSettings, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    """Transformer Engine's modules, and its FP8, where they can run."""
    missing = (
        _no_gpu(facts)
        if facts.num_gpus == 0
        else ""
        if facts.transformer_engine
        else "It is not installed here"
    )
    if model.spec == "te" and missing:
        yield (
            "model.spec",
            f"Transformer Engine's modules run on CUDA alone. {missing}",
            "Use model.spec=local",
        )
    elif model.spec == "te" and model.dtype == "float32":
        rule = "Transformer Engine has no attention over packed sequences in float32"
        yield "model.spec", rule, "Use model.spec=local, or model.dtype=bfloat16"
    if model.fp8 is not None and (missing or model.spec == "local" or model.dtype == "float32"):
        rule = f"FP8 matrix products are those of model.spec=te in bfloat16. {missing or 'Here model.spec is local'}"
        yield "model.fp8", rule, "Leave it null, which trains in model.dtype"


def check_fit(
    c: Configuration, shape: ModelShape, facts: LaunchFacts
) -> Iterator[tuple[str, str, str]]:
    """The longest sequence fits everywhere."""
    prompt, new, positions = (
        c.data.max_prompt_tokens,
        c.rollout.max_new_tokens,
        shape.max_position_embeddings,
    )
    # SGLang keeps two positions of a sequence and seven behind a prompt: beyond, it truncates or
    # refuses requests.
    longest = max(prompt + new + 2, prompt + 7)
    said = (
        f"data.max_prompt_tokens={prompt} + rollout.max_new_tokens={new} and what SGLang keeps free"
    )
    if longest > positions:
        yield (
            "rollout.max_new_tokens",
            f"{said} exceed the model's {positions} positions",
            "Lower one of the two",
        )
    slots = kv_cache_slots(c.engine, device_of(c.engine, facts.num_gpus))
    if c.engine.mode == "managed" and slots is not None and slots < longest:
        yield (
            "engine.max_total_tokens",
            f"One sequence may take {longest} slots ({said})",
            f"Give at least {longest}",
        )


def check_engine(engine: EngineSettings, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    """Who starts the engines, where they listen, what they are started with, and a GPU for each
    rank and engine.
    """
    if engine.tp % engine.ep:
        rule = f"SGLang spreads experts over the ranks of one engine: it must divide engine.tp={engine.tp}"
        yield "engine.ep", rule, "Use a divisor of engine.tp"
    yield from (
        _check_external(engine) if engine.mode == "external" else _check_managed(engine, facts)
    )
    yield from _check_gpus(engine, facts)


def _check_external(engine: EngineSettings) -> Iterator[tuple[str, str, str]]:
    if not engine.urls:
        rule = "engine.mode=external needs the addresses of running servers"
        yield (
            "engine.urls",
            rule,
            "Give them: engine.urls=[http://10.0.0.7:30000], or use engine=managed",
        )
    for problem in (
        *filter(None, map(url_refusal, engine.urls)),
        *repeated_url_refusals(engine.urls),
    ):
        yield problem.key, f"{problem.rule} ({problem.value})", problem.remedy
    for problem in quantization_refusals(engine.quantization):
        yield problem.key, problem.rule, problem.remedy
    if engine.key_file is not None and (found := key_file_refusal(Path(engine.key_file))):
        yield found.key, found.rule, found.remedy
    for name in _FOR_A_START:
        if getattr(engine, name) != getattr(EngineSettings(), name):
            rule = "It is for starting a server, and external ones run already"
            yield (
                f"engine.{name}",
                rule,
                "Remove it and set it where the server is started, or use engine=managed",
            )


def _check_managed(engine: EngineSettings, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    for name in ("urls", "key_file"):
        if getattr(engine, name):
            rule = "engine.mode=managed starts its own servers on free ports with random keys"
            yield f"engine.{name}", rule, "Remove it, or use engine=external"
    for problem in server_refusals(engine, device_of(engine, facts.num_gpus)):
        yield problem.key, problem.rule, problem.remedy
    # Trainer and engines share one process group for weights: NCCL on GPUs, gloo without, never one
    # of each.
    if facts.num_gpus == 0 and engine.device == "cuda":
        yield (
            "engine.device",
            _no_gpu(facts),
            "Use engine.device=auto, or install a CUDA build of torch",
        )
    elif facts.num_gpus > 0 and engine.device == "cpu":
        rule = f"The trainer sends weights from the {facts.num_gpus} GPU(s) here with NCCL, and a CPU engine has none"
        yield (
            "engine.device",
            rule,
            'Use auto, or hide the GPUs from the whole job: CUDA_VISIBLE_DEVICES=""',
        )


def _no_gpu(facts: LaunchFacts) -> str:
    idle = f"The installed torch is built for CPUs and cannot use the {facts.idle_gpus} GPU(s) here"
    return idle if facts.idle_gpus else "No CUDA device is visible here"


def _check_gpus(engine: EngineSettings, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    """No GPU is shared: each rank, and each process of a managed engine, takes one of its own."""
    ranks, engines = (
        facts.local_world_size,
        engine.count * engine.tp if engine.mode == "managed" else 0,
    )
    left = facts.num_gpus - engines
    if 0 < facts.num_gpus < ranks + engines and engine.device != "cpu":
        rule = f"{ranks} trainer rank(s) and {engines} engine process(es) of a node need a GPU each"
        way = (
            "Lower engine.count or engine.tp"
            if engines > 1
            else "Use engine=external, with engines elsewhere"
        )
        way = (
            f"Start at most {left} rank(s) (torchrun --nproc-per-node {left})" if left > 0 else way
        )
        key = "engine.count" if engines else "engine.mode"
        yield (
            key,
            f"{rule}, and {facts.num_gpus} are visible",
            f'{way}, or run all on the CPU: CUDA_VISIBLE_DEVICES=""',
        )


def check_run(run: RunSettings) -> Iterator[tuple[str, str, str]]:
    """The run's directory can be made: the root can hold directories, and the name is not taken."""
    root = Path(run.root)
    if problem := new_directory_problem(run.root):
        yield (
            "run.root",
            problem,
            "Give a directory, or a path to make one at, such as run.root=runs",
        )
    elif run.name is not None and _refused(run) and (root.expanduser() / run.name).exists():
        rule = f"{root / run.name} exists already, and two runs never share a directory"
        remedy = "Choose another, move the old run away, or, if it failed, give run.on_existing=overwrite_failed"
        yield "run.name", rule, f"{remedy}; run.resume=auto goes on with it"


def _refused(run: RunSettings) -> bool:
    """Whether a directory that is there already is none of this run's."""
    return run.on_existing == "refuse" and run.resume != "auto"
