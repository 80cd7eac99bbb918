"""Rules of evaluations, and of the best checkpoint that they choose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.evaluations import HELD_OUT, best_metric, is_best_metric
from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.rules.data import check_columns
from megatron_rl.config.schema import Configuration


def check_evaluation(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about stops by accuracy, sets of questions, and the best checkpoint."""
    if c.mode != "train" and c.eval.stop_at is not None:
        rule = f"mode={c.mode} has no training steps that an accuracy could end"
        yield BrokenRule("eval.stop_at", rule, "Leave it null")
    if c.eval.sets:
        yield from _check_sets(c)
    if c.run.keep_best is not None:
        yield from _check_best(c, c.run.keep_best)


def _check_sets(c: Configuration) -> Iterator[BrokenRule]:
    key = "eval.sets"
    if c.mode not in ("train", "eval"):
        rule = f"mode={c.mode} measures no sets"
        yield BrokenRule(key, rule, "Use mode=eval or mode=train")
    for name, entry in c.eval.sets.items():
        if not Path(entry.path).expanduser().exists():
            rule = f"{name}: there is no such file or folder as {entry.path} (from {Path.cwd()})"
            yield BrokenRule(key, rule, "Give a file of questions, or a data set folder")
        for broken in check_columns(entry.columns, key):
            yield broken._replace(rule=f"{name}.columns: {broken.rule}")
    if HELD_OUT in c.eval.sets:
        rule = f"{HELD_OUT} is the name of the held-out questions of data.*"
        yield BrokenRule(key, rule, "Choose another name")


def _check_best(c: Configuration, keep_best: str) -> Iterator[BrokenRule]:
    key = "run.keep_best"
    if c.mode != "train":
        rule = f"mode={c.mode} has no steps that are evaluated"
        yield BrokenRule(key, rule, "Leave it null, or use mode=train")
    elif not c.run.checkpoint_every:
        rule = "With run.checkpoint_every=0 no checkpoint is saved"
        yield BrokenRule(key, rule, "Give run.checkpoint_every=N, or remove it")
    if not is_best_metric(best_metric(keep_best), c.eval):
        names = ", ".join([HELD_OUT, *c.eval.sets])
        rule = f"No evaluation has this name or metric. The names are {names}"
        remedy = "Give a name, or a metric such as eval/accuracy or eval/NAME/pass@4"
        yield BrokenRule(key, rule, remedy)
