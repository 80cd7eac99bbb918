"""Rules of the training method: data, environment, algorithm and batch fit together."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from megatron_rl.config.algorithms import CorrectionSettings, EspoSettings, SftSettings
from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration, DataSettings, RewardSettings
from megatron_rl.contracts.paths import new_directory_problem, path_problem
from megatron_rl.contracts.plugins import PYTHONPATH_REMEDY, missing_module

# The number of different questions that a finite task has on each side of its split, for any seed.
CAPACITY = {
    "two_digit_addition": {
        "data.num_train": ("training", 8_785),
        "data.num_eval": ("held-out", 1_215),
    }
}
# The only source that reads a key.
_OWNERS = {
    "train_path": "jsonl",
    "eval_path": "jsonl",
    "task": "reasoning_gym",
    "task_config": "reasoning_gym",
}
# Limits of espo_kernels' entropy groups. Importing them from there would import torch.
_MAX_FRACTIONS = 15
_MAX_DENOMINATOR = 1_000_000
_PROFILE_TOOL = "python launch/profile_prompts.py writes one"


def check_data(c: Configuration, keys: Collection[str]) -> Iterator[BrokenRule]:
    """Yield broken rules about keys of the data source and the number of its questions.

    The number of questions of a file or a generator is known only when it is read. The prompt
    source then holds the same rules. keys: those that the command line sets.
    """
    data = c.data
    for name, owner in _OWNERS.items():
        if getattr(data, name) and data.source != owner:
            rule = f"data.source={data.source} does not read this key"
            yield BrokenRule(f"data.{name}", rule, f"Remove it, or choose data={owner}")
    if data.source == "reasoning_gym":
        yield from _check_generator(data)
    for key, (side, capacity) in CAPACITY.get(data.source, {}).items():
        if attrgetter(key)(c) > capacity:
            rule = f"{data.source} has only {capacity} {side} questions"
            yield BrokenRule(key, rule, f"Use {key}={capacity}, or data=column_addition")
    if data.source == "jsonl":
        yield from _check_files(data, keys)
    elif c.rollout.prompts_per_step > data.num_train:
        rule = f"data.num_train={data.num_train} questions cannot fill one step"
        yield BrokenRule("rollout.prompts_per_step", rule, "Lower it, or raise data.num_train")
    if _is_same_file(data.train_path, data.eval_path):
        remedy = "Leave it out: data.num_eval questions are then held out of the training file"
        yield BrokenRule("data.eval_path", "It is the training file", remedy)


def _is_same_file(path: str | None, other: str | None) -> bool:
    if not path or not other:
        return False
    return os.path.realpath(path) == os.path.realpath(other)


def _check_generator(data: DataSettings) -> Iterator[BrokenRule]:
    if data.task is None:
        rule = "data.source=reasoning_gym needs the name of a generator"
        yield BrokenRule("data.task", rule, "Give one: data.task=chain_sum")
    if find_spec("reasoning_gym") is None:
        yield BrokenRule("data.source", "reasoning-gym is not installed", "Run make extras")


def _check_files(data: DataSettings, keys: Collection[str]) -> Iterator[BrokenRule]:
    if data.train_path is None:
        rule = "data.source=jsonl needs a file of questions"
        yield BrokenRule("data.train_path", rule, "Give one: data.train_path=train.jsonl")
    for key, path, count in (
        ("data.train_path", data.train_path, "num_train"),
        ("data.eval_path", data.eval_path, "num_eval"),
    ):
        if path is None:
            continue
        # An experiment's file may set counts for its own task. On the command line they would have
        # no effect.
        if f"data.{count}" in keys and getattr(data, count) != getattr(DataSettings, count):
            rule = f"All rows of {key} are used, so that this setting has no effect"
            yield BrokenRule(f"data.{count}", rule, "Remove it")
        if (problem := path_problem(path, folder=False)) is not None:
            rule = f"{problem} (from {Path.cwd()})"
            yield BrokenRule(key, rule, "Give the path of a JSONL file")


def check_pass_rates(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about the file of pass rates and their range.

    The prompts that the file knows are compared with the data only when it is read.
    """
    if c.mode == "profile":
        yield from _check_new_pass_rates(c.data.pass_rates)
    elif c.data.pass_rates is not None:
        problem = path_problem(c.data.pass_rates, folder=False)
        if problem is not None:
            rule = f"{problem} (from {Path.cwd()})"
            yield BrokenRule("data.pass_rates", rule, f"{_PROFILE_TOOL}, or leave it null")
    limits = c.data.pass_rate_range
    if limits is None:
        return
    if c.mode == "profile" or c.data.pass_rates is None:
        rule = "The pass rates of the prompts are not known"
        remedy = f"Leave it null, or give data.pass_rates: {_PROFILE_TOOL}"
        yield BrokenRule("data.pass_rate_range", rule, remedy)
    if len(limits) != 2 or limits[0] > limits[1]:
        rule = "It is [low, high], with low at most high"
        remedy = "Give such a pair, for example [0.1,0.9]"
        yield BrokenRule("data.pass_rate_range", rule, remedy)


def _check_new_pass_rates(path: str | None) -> Iterator[BrokenRule]:
    """Yield a broken rule if mode=profile cannot write pass rates to this path."""
    key = "data.pass_rates"
    if path is None:
        rule = "mode=profile writes pass rates to a file"
        yield BrokenRule(key, rule, "Give data.pass_rates=rates.jsonl")
    elif Path(path).exists():
        rule = "mode=profile writes a new file, and this one exists already"
        yield BrokenRule(key, rule, "Give another name, or remove the file")
    elif problem := new_directory_problem(str(Path(path).parent)):
        rule = f"{problem} (from {Path.cwd()})"
        yield BrokenRule(key, rule, "Give a path where a file can be written")


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
    if rollout.samples_per_prompt < 2 and c.algo.advantages == "group":
        rule = "Advantages are relative to the group, which needs at least two samples"
        remedy = "Give at least 2, or choose algo.advantages=one"
        yield BrokenRule("rollout.samples_per_prompt", rule, remedy)
    if rollout.max_staleness > 0:
        rule = "Asynchronous rollouts are not supported: each step trains on its own rollouts"
        yield BrokenRule("rollout.max_staleness", rule, "Use rollout.max_staleness=0")


def _check_plugins(c: Configuration) -> Iterator[BrokenRule]:
    for key in ("algo.name", "data.source", "environment.name", "reward.name"):
        name = attrgetter(key)(c)
        options = f"{key.partition('.')[0]}.options"
        if ":" in name:
            if problem := missing_module(name):
                yield BrokenRule(key, problem, PYTHONPATH_REMEDY)
        elif key != "algo.name" and attrgetter(options)(c):
            rule = f"Options are for a user-defined class, and {key}={name}"
            yield BrokenRule(options, rule, "Remove them")
    if ":" in c.reward.name and c.reward.answer != RewardSettings.answer:
        rule = f"Only exact_match reads this key, and reward.name={c.reward.name}"
        yield BrokenRule("reward.answer", rule, "Remove it")


def _check_algorithm(c: Configuration) -> Iterator[BrokenRule]:
    if isinstance(c.algo, SftSettings) and c.environment.name == "single_turn":
        rule = (
            "algo=sft makes every response more likely, correct or incorrect, and these responses "
            "are the model's own"
        )
        remedy = "Use environment=demonstration, or algo=grpo, gspo or espo"
        yield BrokenRule("algo.name", rule, remedy)
    if isinstance(c.algo, SftSettings) and c.algo.advantages == "group":
        yield BrokenRule("algo.advantages", "The loss of algo=sft has no advantages", "Use one")
    if c.algo.permute_rewards and c.algo.advantages == "one":
        rule = "With algo.advantages=one no reward is used"
        remedy = "Remove it, or use algo.advantages=group"
        yield BrokenRule("algo.permute_rewards", rule, remedy)
    fractions = c.algo.fractions if isinstance(c.algo, EspoSettings) else []
    if _exact_sum(fractions) > 1 or len(fractions) > _MAX_FRACTIONS:
        rule = (
            f"Fractions must not add up to more than 1, and there can be at most {_MAX_FRACTIONS}"
        )
        yield BrokenRule("algo.fractions", rule, "Use [0.2] for two groups, or [] for one")


def _exact_sum(fractions: Sequence[float]) -> Fraction:
    """Add fractions as they are written, without the rounding of floats."""
    shares = (Fraction(fraction).limit_denominator(_MAX_DENOMINATOR) for fraction in fractions)
    return sum(shares, Fraction(0))


def check_environment(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about demonstrations, which no engine samples, and about dropout."""
    if c.environment.name == "demonstration":
        yield from _check_demonstration(c)
    elif c.sync.when == "evaluation":
        rule = f"environment.name={c.environment.name} samples with the weights of every step"
        yield BrokenRule("sync.when", rule, "Use sync.when=step")
    elif c.model.hidden_dropout:
        rule = (
            "With dropout another policy would be trained than the one that "
            f"environment.name={c.environment.name} samples"
        )
        remedy = "Use 0, or environment=demonstration"
        yield BrokenRule("model.hidden_dropout", rule, remedy)
    for key in ("model.hidden_dropout", "model.embedding_std"):
        if attrgetter(key)(c) and c.model.init != "random":
            rule = "This setting is for training from random weights"
            yield BrokenRule(key, rule, "Remove it, or use model.init=random")


def _check_demonstration(c: Configuration) -> Iterator[BrokenRule]:
    if c.data.source == "reasoning_gym":
        rule = "data.source=reasoning_gym has no worked responses"
        yield BrokenRule("environment.name", rule, "Use data=column_addition")
    if c.algo.advantages != "one":
        rule = "Worked responses are not compared with each other"
        yield BrokenRule("algo.advantages", rule, "Use one, as algo=sft does")
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
