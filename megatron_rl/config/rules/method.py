"""What is trained on what: data, environment, algorithm and batch go together."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from megatron_rl.config.algorithms import EspoSettings, SftSettings
from megatron_rl.config.schema import Configuration, DataSettings, RewardSettings
from megatron_rl.contracts.paths import path_problem, new_directory_problem
from megatron_rl.contracts.plugins import PYTHONPATH_REMEDY, missing_module

# How many different questions a finite task has on each side of its split, whatever the seed.
CAPACITY = {
    "two_digit_addition": {
        "data.num_train": ("training", 8_785),
        "data.num_eval": ("held-out", 1_215),
    }
}
_OWNERS = {
    "train_path": "jsonl",
    "eval_path": "jsonl",
    "task": "reasoning_gym",
    "task_config": "reasoning_gym",
}


def check_data(c: Configuration, given: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Each source has its own keys, enough questions, and files that exist. given: keys of the
    command line.

    How many questions a file or a generator has is known when it is read: the prompt source holds
    the same rules.
    """
    data, source = c.data, c.data.source
    for key, owner in _OWNERS.items():
        if getattr(data, key) and source != owner:
            yield (
                f"data.{key}",
                f"It has no meaning with data.source={source}",
                f"Remove it, or choose data={owner}",
            )
    if source == "reasoning_gym" and data.task is None:
        yield (
            "data.task",
            "data.source=reasoning_gym needs a generator's name",
            "Give one: data.task=chain_sum",
        )
    if source == "reasoning_gym" and find_spec("reasoning_gym") is None:
        yield "data.source", "reasoning-gym is not installed", "Run make extras"
    for key, (side, most) in CAPACITY.get(source, {}).items():
        if attrgetter(key)(c) > most:
            yield (
                key,
                f"{source} has {most} {side} questions in all",
                f"Use {key}={most}, or data=column_addition",
            )
    if source != "jsonl" and c.rollout.prompts_per_step > data.num_train:
        rule = f"data.num_train={data.num_train} questions cannot fill one step"
        yield "rollout.prompts_per_step", rule, "Lower it, or raise data.num_train"
    if source == "jsonl" and data.train_path is None:
        yield (
            "data.train_path",
            "data.source=jsonl needs a file of questions",
            "Give one: data.train_path=train.jsonl",
        )
    for key, path, count in (
        ("train_path", data.train_path, "num_train"),
        ("eval_path", data.eval_path, "num_eval"),
    ):
        if source == "jsonl" and path is not None:
            # Counts that a recipe brings along may go unused; those that a user asks for may not.
            if f"data.{count}" in given and getattr(data, count) != getattr(DataSettings, count):
                yield (
                    f"data.{count}",
                    f"All rows of data.{key} are used, whatever it says",
                    "Remove it",
                )
            if (problem := path_problem(path, folder=False)) is not None:
                yield (
                    f"data.{key}",
                    f"{problem} (from {Path.cwd()})",
                    "Give the path of a JSONL file",
                )
    if (
        data.train_path
        and data.eval_path
        and os.path.realpath(data.train_path) == os.path.realpath(data.eval_path)
    ):
        yield (
            "data.eval_path",
            "It is the training file",
            "Leave it out: data.num_eval questions are held out of it",
        )


def check_pass_rates(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """Pass rates and the band held against them; which prompts a file knows is seen when it is
    read.
    """
    path, band, key = c.data.pass_rates, c.data.pass_rate_range, "data.pass_rates"
    tool = "python launch/profile_prompts.py writes one"
    if c.mode == "profile" and path is None:
        yield key, "mode=profile writes pass rates to a file", "Give data.pass_rates=rates.jsonl"
    elif c.mode == "profile" and path is not None and Path(path).exists():
        yield (
            key,
            "mode=profile writes a new file, and it is there already",
            "Give another name, or remove it",
        )
    elif (
        c.mode == "profile"
        and path is not None
        and (problem := new_directory_problem(str(Path(path).parent)))
    ):
        yield key, f"{problem} (from {Path.cwd()})", "Give a path where a file can be written"
    elif c.mode != "profile" and path is not None and (problem := path_problem(path, folder=False)):
        yield key, f"{problem} (from {Path.cwd()})", f"{tool}, or leave it null"
    if band is not None and (c.mode == "profile" or path is None):
        yield (
            "data.pass_rate_range",
            "The pass rates of the prompts are not known",
            f"Leave it null; data.pass_rates: {tool}",
        )
    if band is not None and (len(band) != 2 or band[0] > band[1]):
        yield (
            "data.pass_rate_range",
            "It is [low, high], with low at most high",
            "Give such a pair, for example [0.1,0.9]",
        )


def check_method(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """Algorithm, users' own classes, environment, and how a batch is split."""
    for section in ("algo.name", "data.source", "environment.name", "reward.name"):
        name, options = attrgetter(section)(c), f"{section.partition('.')[0]}.options"
        if ":" in name and (problem := missing_module(name)):
            yield section, problem, PYTHONPATH_REMEDY
        if ":" not in name and section != "algo.name" and attrgetter(options)(c):
            yield options, f"They are for a class of your own, and {section}={name}", "Remove them"
    if ":" in c.reward.name and c.reward.answer != RewardSettings.answer:
        yield (
            "reward.answer",
            f"Only exact_match reads it, and reward.name={c.reward.name}",
            "Remove it",
        )
    if isinstance(c.algo, SftSettings) and c.environment.name == "single_turn":
        rule = (
            "algo=sft makes every response likelier, right or wrong, and these are the model's own"
        )
        yield "algo.name", rule, "Use environment=demonstration, or algo=grpo, gspo or espo"
    if isinstance(c.algo, SftSettings) and c.algo.advantages == "group":
        yield "algo.advantages", "The loss of algo=sft has no advantages", "Use one"
    if c.algo.permute_rewards and c.algo.advantages == "one":
        yield (
            "algo.permute_rewards",
            "With algo.advantages=one no reward is used",
            "Remove it, or use advantages=group",
        )
    fractions = c.algo.fractions if isinstance(c.algo, EspoSettings) else []
    if sum(fractions) > 1 or len(fractions) > 254:
        rule = "The fractions must not add up to more than 1, and be at most 254: groups are numbered in uint8"
        yield "algo.fractions", rule, "Use [0.2] for two groups, [] for none"
    samples = c.rollout.prompts_per_step * c.rollout.samples_per_prompt
    if samples < c.train.optimizer_steps_per_batch:
        rule = f"{samples} samples cannot be split over so many optimizer steps"
        yield "train.optimizer_steps_per_batch", rule, "Lower it, or raise rollout.prompts_per_step"
    if c.rollout.samples_per_prompt < 2 and c.algo.advantages == "group":
        rule = "Advantages are relative to the group, and a group needs two to compare"
        yield "rollout.samples_per_prompt", rule, "Give at least 2, or choose algo.advantages=one"
    if c.rollout.max_staleness > 0:
        rule = "Each step trains on its own rollouts, because rollouts are not asynchronous yet"
        yield "rollout.max_staleness", rule, "Use rollout.max_staleness=0"


def check_environment(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """Worked responses are shown, not sampled: nothing is compared or replayed, and engines only
    evaluate.
    """
    environment, model = c.environment.name, c.model
    if environment == "demonstration":
        if c.data.source == "reasoning_gym":
            yield (
                "environment.name",
                "data.source=reasoning_gym has no worked responses",
                "Use data=column_addition",
            )
        if c.algo.advantages != "one":
            yield (
                "algo.advantages",
                "Worked responses are not compared with one another",
                "Use one, as algo=sft does",
            )
        if c.train.replay == "rollout":
            yield (
                "train.replay",
                "No engine chose routes for a worked response",
                "Use train.replay=trainer or off",
            )
    elif c.sync.when == "evaluation":
        yield (
            "sync.when",
            f"environment.name={environment} samples from every step's weights",
            "Use sync.when=step",
        )
    elif model.hidden_dropout:
        rule = f"Dropout trains another policy than the one that environment.name={environment} samples"
        yield "model.hidden_dropout", rule, "Use 0, or environment=demonstration"
    for key, value in (
        ("model.hidden_dropout", model.hidden_dropout),
        ("model.embedding_std", model.embedding_std),
    ):
        if value and model.init != "random":
            yield (
                key,
                "It is for weights that start at random",
                "Remove it, or use model.init=random",
            )


def check_replay(c: Configuration) -> Iterator[tuple[str, str, str]]:
    """What can be measured of replay; kinds of correction with their levels, and what there is to
    correct.
    """
    if c.train.replay_measure_every and c.train.replay != "rollout":
        rule = f"It compares with routes that engines recorded, and train.replay={c.train.replay}"
        yield "train.replay_measure_every", rule, "Use 0, or train.replay=rollout"
    correction, kind = c.algo.correction, c.algo.correction.kind
    if kind != "off" and (isinstance(c.algo, SftSettings) or c.environment.name == "demonstration"):
        yield (
            "algo.correction.kind",
            "It corrects what an engine sampled, and responses are shown here",
            "Use off",
        )
    for name in ("level", "low", "high"):
        if kind == "off" and attrgetter(name)(correction) is not None:
            yield (
                f"algo.correction.{name}",
                "It has no meaning with kind=off",
                "Remove it, or choose a kind",
            )
    if kind == "tis" and correction.low is not None:
        yield (
            "algo.correction.low",
            "Truncation has an upper bound alone",
            "Remove it, or use kind=icepop",
        )
    if kind == "icepop" and correction.level not in (None, "token"):
        yield (
            "algo.correction.level",
            "IcePop masks single tokens",
            "Use token, or kind=mis for whole sequences",
        )
    if kind == "mis" and correction.level == "token":
        yield (
            "algo.correction.level",
            "mis masks whole sequences",
            "Use kind=icepop, which masks tokens",
        )
