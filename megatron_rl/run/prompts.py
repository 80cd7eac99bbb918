"""Builds the prompts of a run with the tokenizer, chat template and scorer that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_rl.config.curriculum import phases_of
from megatron_rl.config.evaluations import HELD_OUT
from megatron_rl.config.schema import Configuration, EnvironmentSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.environments.demonstration import Demonstration
from megatron_rl.environments.environment import open_environment
from megatron_rl.models.chat_template import ChatTemplate
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts, open_set
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rewards import open_answer_reader


def build_prompts(c: Configuration) -> PromptSource:
    """Read the training and held-out prompts, all of them readable and answerable.

    Raises `PromptDataError`.
    """
    phases = [phase.configuration for phase in phases_of(c)]
    tokenizer = Tokenizer.from_directory(c.model.path)
    prompts = open_prompts(
        c.data,
        tokenizer,
        open_answer_reader(c.reward),
        render=ChatTemplate(Path(c.model.path)).prompt,
        check_demonstration=_demonstration_check(
            c.environment,
            tokenizer,
            # Each phase may train each prompt
            min(configuration.rollout.max_new_tokens for configuration in phases or [c]),
        ),
    )
    _require_tasks(c, prompts)
    # Every phase must have enough prompts. The run's own range comes last, and stays.
    for configuration in (*phases, c):
        prompts.set_pass_rate_range(configuration.data.pass_rate_range)
        prompts.require(c.rollout.prompts_per_step)
    return prompts


def _require_tasks(c: Configuration, prompts: PromptSource) -> None:
    """Raise `PromptDataError` if a part of the reward is for a task that no prompt has."""
    tasks = {prompt.task for prompt in (*prompts.train, *prompts.held_out)}
    for name, part in c.reward.parts.items():
        missing_tasks = sorted(set(part.tasks) - tasks)
        # A set of eval.sets may have them
        if missing_tasks and not c.eval.sets:
            raise PromptDataError(
                f"reward.parts.{name}.tasks={part.tasks}: no prompt has the task "
                f"{missing_tasks[0]!r}. The tasks are: {', '.join(sorted(tasks))}. Name one of them"
            )


def _demonstration_check(
    settings: EnvironmentSettings, tokenizer: Tokenizer, max_new_tokens: int
) -> Callable[[Prompt], None] | None:
    """Return the check of the environment that demonstrates, None for another one."""
    if settings.name != "demonstration":
        return None
    environment = open_environment(settings)
    assert isinstance(environment, Demonstration)
    return lambda prompt: environment.check(prompt, tokenizer, max_new_tokens)


def build_sets(c: Configuration) -> dict[str, tuple[Prompt, ...]]:
    """Read the prompts of the modes that train nothing, by name of the set.

    mode=eval: eval.sets, or the held-out questions. mode=profile: every training prompt, whatever
    its pass rate. Raises `PromptDataError`.
    """
    if c.mode == "profile":
        without_rates = replace(c, data=replace(c.data, pass_rates=None))
        return {"train": build_prompts(without_rates).train}
    if not c.eval.sets:
        return {HELD_OUT: build_prompts(c).held_out}
    return read_sets(c)


def read_sets(c: Configuration) -> dict[str, tuple[Prompt, ...]]:
    """Read the questions of eval.sets, by name. Raises `PromptDataError`."""
    if not c.eval.sets:
        return {}
    tokenizer = Tokenizer.from_directory(c.model.path)
    render = ChatTemplate(Path(c.model.path)).prompt
    read_answer = open_answer_reader(c.reward)
    return {
        name: tuple(
            open_set(
                name,
                entry.path,
                c.data,
                tokenizer,
                read_answer,
                render=render,
                columns=entry.columns,
            )
        )
        for name, entry in c.eval.sets.items()
    }
