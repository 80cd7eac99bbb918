"""Options of the command that rehearses a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.gpus import GPUS, Gpu
from launch.rehearsal.synthetic_batches import Routing
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts

_INTEGERS = {"rank": 0, "ranks": 1, "gpus_per_node": 8, "micro_batches": 0}


@dataclass(frozen=True)
class Options:
    """The options of the command.

    micro_batches: 0 for as many as fill the pipeline. out: empty for no file.
    """

    rank: int
    ranks: int
    gpus_per_node: int
    micro_batches: int
    gpu: Gpu
    routing: Routing
    out: str
    remedies: bool
    overrides: tuple[str, ...]

    def configuration(self) -> Configuration:
        """Compose the settings of the run. Raises `ConfigurationRefused`."""
        facts = LaunchFacts(
            world_size=self.ranks,
            local_world_size=min(self.ranks, self.gpus_per_node),
            num_gpus=self.gpus_per_node,
        )
        return compose(self.overrides, facts=facts)


def read_options(arguments: Sequence[str]) -> Options:
    """Tell the command's options from the overrides of the configuration.

    Raises `RehearsalUnavailable` naming option, value, rule and remedy.
    """
    texts = {"gpu": "h100", "routing": "balanced", "out": "", "remedies": "true"}
    numbers = dict(_INTEGERS)
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in texts:
            texts[key] = value
        elif key in numbers:
            numbers[key] = _read_number(key, value)
        else:
            overrides.append(argument)
    if texts["gpu"] not in GPUS:
        raise RehearsalUnavailable(f"gpu={texts['gpu']!r}: choose one of {', '.join(GPUS)}")
    if texts["routing"] not in get_args(Routing):
        raise RehearsalUnavailable(
            f"routing={texts['routing']!r}: choose one of {', '.join(get_args(Routing))}"
        )
    if texts["remedies"] not in ("true", "false"):
        raise RehearsalUnavailable(f"remedies={texts['remedies']!r}: give true or false")
    if not 0 <= numbers["rank"] < numbers["ranks"]:
        raise RehearsalUnavailable(
            f"rank={numbers['rank']}: there are ranks={numbers['ranks']}, counted from 0. Give a "
            "smaller rank, or more ranks"
        )
    return Options(
        **numbers,
        gpu=GPUS[texts["gpu"]],
        routing=cast(Routing, texts["routing"]),
        out=texts["out"],
        remedies=texts["remedies"] == "true",
        overrides=tuple(overrides),
    )


def _read_number(key: str, value: str) -> int:
    if not value.isdecimal():
        raise RehearsalUnavailable(f"{key}={value!r}: give a whole number from 0")
    return int(value)
