"""Rules of the training method: environment, algorithm and batch fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from operator import attrgetter

from megatron_rl.config.algorithms import (
    CorrectionSettings,
    CustomAlgoSettings,
    EspoSettings,
    SftSettings,
)
from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.plugins import PYTHONPATH_REMEDY, missing_module

# Limits of espo_kernels' entropy groups. Importing them from there would import torch.
_MAX_FRACTIONS = 15
_MAX_DENOMINATOR = 1_000_000
# The values of this project that read options
_OPTION_READERS = {"data.source": "reasoning_gym", "environment.name": "demonstration"}


def check_method(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about plugins, the algorithm, and the split of a batch."""
    yield from _check_plugins(c)
    yield from _check_algorithm(c)
    rollout = c.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if samples < c.train.optimizer_steps_per_batch:
        rule = f"{samples} samples cannot be split over so many optimizer steps"
        remedy = "Lower it, or raise rollout.prompts_per_step"
        yield BrokenRule("train.optimizer_steps_per_batch", rule, remedy)
    if rollout.samples_per_prompt < 2 and c.algo.compares_groups(c.environment.name):
        rule = "Advantages are relative to the group, which needs at least two samples"
        yield BrokenRule("rollout.samples_per_prompt", rule, "Give at least 2")


def _check_plugins(c: Configuration) -> Iterator[BrokenRule]:
    for key in ("algo.name", "data.source", "environment.name"):
        name = attrgetter(key)(c)
        options = f"{key.partition('.')[0]}.options"
        if ":" in name:
            if problem := missing_module(name):
                yield BrokenRule(key, problem, PYTHONPATH_REMEDY)
        elif key != "algo.name" and name != _OPTION_READERS.get(key) and attrgetter(options)(c):
            rule = f"{key}={name} reads no options"
            also = f", or use {_OPTION_READERS[key]}" if key in _OPTION_READERS else ""
            remedy = f"Remove them{also}. A user-defined class gets them, too"
            yield BrokenRule(options, rule, remedy)


def _check_algorithm(c: Configuration) -> Iterator[BrokenRule]:
    remedies = {
        "single_turn": "environment=demonstration",
        "calculator": "environment=demonstration environment.options.tool=calculator",
    }
    if isinstance(c.algo, SftSettings) and c.environment.name in remedies:
        rule = (
            "algo=sft makes every response more likely, correct or incorrect, and these responses "
            "are the model's own"
        )
        remedy = f"Use {remedies[c.environment.name]}, or algo=grpo, gspo or espo"
        yield BrokenRule("algo.name", rule, remedy)
    fractions = c.algo.fractions if isinstance(c.algo, EspoSettings) else []
    if _exact_sum(fractions) > 1 or len(fractions) > _MAX_FRACTIONS:
        rule = (
            f"Fractions must not add up to more than 1, and there can be at most {_MAX_FRACTIONS}"
        )
        yield BrokenRule("algo.fractions", rule, "Use [0.2] for two groups, or [] for one")


def _exact_sum(fractions: Sequence[float]) -> Fraction:
    """Add fractions with the values that are written, without the rounding of floats."""
    shares = (Fraction(fraction).limit_denominator(_MAX_DENOMINATOR) for fraction in fractions)
    return sum(shares, Fraction(0))


def check_environment(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about demonstrations, which no engine samples, and about dropout."""
    if c.environment.name == "demonstration":
        yield from _check_demonstration(c)
    elif c.model.hidden_dropout:
        rule = (
            "With dropout another policy would be trained than the one that "
            f"environment.name={c.environment.name} samples"
        )
        remedy = "Use 0, or environment=demonstration"
        yield BrokenRule("model.hidden_dropout", rule, remedy)
    if c.model.hidden_dropout and c.model.init != "random":
        rule = "This setting is for training from random weights"
        yield BrokenRule("model.hidden_dropout", rule, "Remove it, or use model.init=random")


def _check_demonstration(c: Configuration) -> Iterator[BrokenRule]:
    if c.environment.options not in ({}, {"tool": None}, {"tool": "calculator"}):
        rule = "The only option of environment=demonstration is {tool: calculator}"
        yield BrokenRule("environment.options", rule, "Give it, or remove the options")
    if c.data.source == "reasoning_gym":
        rule = "data.source=reasoning_gym has no worked responses"
        yield BrokenRule("environment.name", rule, "Use data=column_addition")
    if not isinstance(c.algo, SftSettings | CustomAlgoSettings):
        rule = "Worked responses are not compared with each other, and no engine samples them"
        yield BrokenRule("algo.name", rule, "Use algo=sft, or your own loss")
    if c.train.replay == "rollout":
        rule = "Worked responses have no routes of an engine"
        yield BrokenRule("train.replay", rule, "Use train.replay=trainer or off")


def check_replay(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about measurements of replay and corrections of the engine's policy."""
    if c.train.replay_measure_every and c.train.replay != "rollout":
        rule = (
            "The measurement compares with routes that engines recorded, and "
            f"train.replay={c.train.replay}"
        )
        yield BrokenRule("train.replay_measure_every", rule, "Use 0, or train.replay=rollout")
    yield from _check_correction(c)
    yield from _check_correction_kind(c.algo.correction)


def _check_correction(c: Configuration) -> Iterator[BrokenRule]:
    correction = c.algo.correction
    samples_nothing = isinstance(c.algo, SftSettings) or c.environment.name == "demonstration"
    if correction.kind != "off" and samples_nothing:
        rule = "It corrects the policy of an engine, which samples no responses here"
        yield BrokenRule("algo.correction.kind", rule, "Use off")
    for name in ("level", "low", "high"):
        if correction.kind == "off" and getattr(correction, name) is not None:
            rule = "This setting has no effect with algo.correction.kind=off"
            yield BrokenRule(f"algo.correction.{name}", rule, "Remove it, or choose a kind")


def _check_correction_kind(correction: CorrectionSettings) -> Iterator[BrokenRule]:
    if correction.kind == "tis" and correction.low is not None:
        rule = "Truncation (tis) has only an upper bound"
        yield BrokenRule("algo.correction.low", rule, "Remove it, or use kind=icepop")
    if correction.kind == "icepop" and correction.level not in (None, "token"):
        remedy = "Use token, or kind=mis for whole sequences"
        yield BrokenRule("algo.correction.level", "IcePop masks single tokens", remedy)
    if correction.kind == "mis" and correction.level == "token":
        remedy = "Use kind=icepop, which masks tokens"
        yield BrokenRule("algo.correction.level", "mis masks whole sequences", remedy)
