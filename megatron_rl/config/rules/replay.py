"""What engine and trainer do otherwise, measured and corrected."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from megatron_rl.config.algorithms import SftSettings
from megatron_rl.config.schema import Configuration


def check_replay(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """What can be measured of replay; kinds of correction with their levels, and what there is to correct."""
    if c.train.measure_replay_every and c.train.replay != "rollout":
        rule = f"It compares with routes that engines recorded, and train.replay={c.train.replay}"
        yield "train.measure_replay_every", rule, "Use 0, or train.replay=rollout"
    correction, kind = c.algo.correction, c.algo.correction.kind
    if kind != "off" and (isinstance(c.algo, SftSettings) or c.environment.name == "worked"):
        yield "algo.correction.kind", "It corrects what an engine sampled, and responses are shown here", "Use off"
    for name in ("level", "low", "high"):
        if kind == "off" and attrgetter(name)(correction) is not None:
            yield f"algo.correction.{name}", "It has no meaning with kind=off", "Remove it, or choose a kind"
    if kind == "tis" and correction.low is not None:
        yield "algo.correction.low", "Truncation has an upper bound alone", "Remove it, or use kind=icepop"
    if kind == "icepop" and correction.level not in (None, "token"):
        yield "algo.correction.level", "IcePop masks single tokens", "Use token, or kind=mis for whole sequences"
    if kind == "mis" and correction.level == "token":
        yield "algo.correction.level", "mis masks whole sequences", "Use kind=icepop, which masks tokens"
