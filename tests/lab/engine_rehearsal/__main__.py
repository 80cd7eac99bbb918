"""Rehearse the start of an engine on GPUs, and its loading of weights, without a GPU.

Examples, with the settings of launch/train_rl.py:

    python -m tests.lab.engine_rehearsal model=qwen3_30b_a3b model.path=DIR model.init=random \
        ranks=16 parallel=pp2_ep8 engine=external engine.urls=[http://10.0.0.7:30000] \
        engine.tp=4 engine.ep=4

Options: gpu (h100 or h200), ranks (the number of all ranks), gpus_per_node (8), layers (of the
model that is loaded; 0 for all), weights (bfloat16, fp8_blockwise or none), out (a file for all
numbers as JSON). DIR needs its config.json and tokenizer alone. Output: the arguments, what SGLang
makes of them, the weights of a rank, and every contradiction with the configuration. Exit code: 0,
or 2 for a contradiction or a setting that is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, get_args

import msgspec

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.families import read_shape
from megatron_rl.planning.memory import engine_memory
from tests.lab.engine_rehearsal.findings import summarize
from tests.lab.engine_rehearsal.rehearsal import GIB, GPUS, Rehearsal, Weights, Workload, rehearse

_NUMBERS = {"ranks": 1, "gpus_per_node": 8, "layers": 0}
_TEXTS = {"gpu": "h100", "weights": "bfloat16", "out": ""}
_CHOICES = {"gpu": tuple(GPUS), "weights": get_args(Weights)}


class OptionRefused(Failure):
    """An option of this command that is refused."""

    exit_code = ExitCode.REFUSED


def read_options(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, int], list[str]]:
    """(texts, numbers, overrides of the configuration). Raises `OptionRefused`."""
    texts = dict(_TEXTS)
    numbers = dict(_NUMBERS)
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in texts:
            texts[key] = value
        elif key in numbers:
            if not value.isdecimal():
                raise OptionRefused(f"{key}={value!r}: give a whole number from 0")
            numbers[key] = int(value)
        else:
            overrides.append(argument)
    for key, choices in _CHOICES.items():
        if texts[key] not in choices:
            raise OptionRefused(f"{key}={texts[key]!r}: choose one of {', '.join(choices)}")
    return texts, numbers, overrides


def describe(rehearsal: Rehearsal, estimate: int) -> Iterator[str]:
    """The lines of the report. estimate: bytes of a rank's weights, as preflight expects them."""
    yield f"arguments: {' '.join(rehearsal.arguments)}"
    for change in rehearsal.reply.changes:
        yield f"SGLang sets {change.name}: {change.before} → {change.after}"
    for name, value in sorted(rehearsal.reply.environment.items()):
        yield f"SGLang sets {name}={value} in its environment"
    for line in dict.fromkeys(rehearsal.reply.messages):
        yield f"SGLang says: {line}"
    if rehearsal.reply.ranks:
        yield (
            f"weights: {len(rehearsal.tensors):,} tensors for {len(rehearsal.reply.ranks)} ranks, "
            f"{rehearsal.parameter_bytes / GIB:.2f} GiB on the largest; preflight expects "
            f"{estimate / GIB:.2f} GiB of all layers"
        )
    lines = summarize(rehearsal.findings)
    for line in lines:
        yield f"contradiction: {line}"
    if not lines:
        yield "no contradictions"


def run(arguments: Sequence[str]) -> int:
    """Rehearse and print the report. Returns the exit code."""
    texts, numbers, overrides = read_options(arguments)
    facts = LaunchFacts(
        world_size=numbers["ranks"],
        local_world_size=min(numbers["ranks"], numbers["gpus_per_node"]),
        num_gpus=numbers["gpus_per_node"],
    )
    c: Configuration = compose(overrides, facts=facts)
    workload = Workload(GPUS[texts["gpu"]], numbers["layers"], cast(Weights, texts["weights"]))
    rehearsal = rehearse(c, workload)
    for line in describe(rehearsal, engine_memory(c, read_shape(c.model.path)).parameters):
        print(line)
    if texts["out"]:
        Path(texts["out"]).write_bytes(msgspec.json.encode(rehearsal))
    return ExitCode.REFUSED if rehearsal.findings else ExitCode.OK


def main() -> int:
    """Run the command and return its exit code."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return ExitCode.OK
    try:
        return run(sys.argv[1:])
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
