"""The questions of a run, with everything that reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_rl.config.curriculum import phases_of
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts, open_set
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rewards import open_answer_check


def build_prompts(c: Configuration, beliefs: TransferredBeliefs | None = None) -> PromptSource:
    """Training and held-out prompts, all of them readable and answerable. Raises `PromptDataError`.

    beliefs: of another run, to begin with.
    """
    tokenizer = Tokenizer.from_directory(c.model.path)
    render, demonstration = (
        ChatTemplate(Path(c.model.path)).prompt,
        c.environment.name == "demonstration",
    )
    prompts = open_prompts(
        c.data, tokenizer, open_answer_check(c.reward), render=render, demonstration=demonstration
    )
    for of_a_step in (*(phase.configuration for phase in phases_of(c)), c):
        prompts.choose(of_a_step.data.pass_rate_range)
        prompts.require(c.rollout.prompts_per_step)
    if beliefs is not None:
        beliefs.give(prompts)
    return prompts


def build_sets(c: Configuration) -> dict[str, tuple[Prompt, ...]]:
    """What modes that train nothing ask, by name. Raises `PromptDataError`.

    mode=eval: eval.sets, or the held-out questions; mode=profile: every training prompt, of which
    no rates are known.
    """
    if c.mode == "profile":
        return {"train": build_prompts(replace(c, data=replace(c.data, pass_rates=None))).train}
    if not c.eval.sets:
        return {"held_out": build_prompts(c).held_out}
    tokenizer, render = (
        Tokenizer.from_directory(c.model.path),
        ChatTemplate(Path(c.model.path)).prompt,
    )
    check = open_answer_check(c.reward)
    return {
        name: tuple(open_set(name, file, c.data, tokenizer, check, render=render))
        for name, file in c.eval.sets.items()
    }
