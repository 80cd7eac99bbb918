"""The algorithm's settings among themselves."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.refusal import Refusal
from megatron_rl.config.schema import AlgoConfig, EspoConfig
from megatron_rl.config.store import ALGORITHMS


def check_algo(algo: AlgoConfig) -> Iterator[Refusal]:
    """The name is that of the schema, and ESPO's fractions leave room for the remaining tokens."""
    names = [name for name, schema in ALGORITHMS.items() if type(algo) is schema]
    if [algo.name] != names:
        rule = "The name and the settings belong to different algorithms"
        yield Refusal("algo.name", algo.name, rule, f"Choose the whole group: algo={'|'.join(ALGORITHMS)}")
    if isinstance(algo, EspoConfig):
        yield from _check_fractions(algo.fractions)


def _check_fractions(fractions: list[float]) -> Iterator[Refusal]:
    example = "Use [0.2] for two groups, [] for none"
    if any(not 0 < fraction <= 1 for fraction in fractions):
        yield Refusal("algo.fractions", fractions, "Every fraction must be greater than 0 and at most 1", example)
    elif sum(fractions) > 1:
        yield Refusal("algo.fractions", fractions, "The fractions must not add up to more than 1", example)
    if len(fractions) > 254:
        yield Refusal("algo.fractions", fractions, "Groups are numbered in uint8: at most 254 fractions", example)
