"""Dynamic sampling (DAPO, arXiv 2503.14476, 3.2): full groups of every prompt in turn until enough
are mixed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.config.schema import RolloutSettings, SelectionSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.credit.group_kinds import Kind, kind_of
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult
from megatron_rl.prompts.source import PromptSource


@dataclass
class Oversample:
    """Rounds of `rollout.prompts_per_step` prompts, each awaited as a whole: see `Selector`.

    kept: mixed groups that the step before had too many of; they come first in the next one, with
    the weights they were drawn with, and are in no list of the step that drew them. A checkpoint
    does not hold them.
    """

    source: PromptSource
    rollout: RolloutSettings
    settings: SelectionSettings
    kept: list[Group] = field(default_factory=list)

    def select(self, step: int) -> OversampleStep:
        self.source.begin_step()
        return OversampleStep(self, tuple(self.kept))

    def state(self) -> SelectorState:
        return SelectorState(prompts=self.source.cursor)

    def restore(self, state: SelectorState) -> None:
        self.source.seek(state.prompts)

    def widen(self) -> None:
        """There is nothing to forget."""


@dataclass
class OversampleStep:
    """The choices of one step; see `StepSelection`. kept: groups of the step before."""

    selector: Oversample
    kept: tuple[Group, ...]
    _prompts: list[Prompt] = field(default_factory=list)
    _groups: dict[int, Group] = field(default_factory=dict)
    _rounds: int = 0
    _metrics: dict[str, float] = field(default_factory=dict)

    def begin(self) -> list[RolloutRequest]:
        return self.more()

    def answered(self, index: int, group: Group) -> RolloutRequest | None:
        self._groups[index] = group
        return None

    def more(self) -> list[RolloutRequest]:
        wanted, samples = (
            self.selector.rollout.prompts_per_step,
            self.selector.rollout.samples_per_prompt,
        )
        first = len(self._prompts)
        if self._mixed() >= wanted or first + wanted > self.selector.settings.budget * wanted:
            return []
        ids = {prompt.id for prompt in self._prompts} | {group.prompt.id for group in self.kept}
        for _ in range(wanted):
            offered = self.selector.source.offer(ids)
            if offered is None:
                break
            self._prompts.append(offered[0])
            ids.add(offered[0].id)
        asks = [
            RolloutRequest(index, prompt, samples)
            for index, prompt in enumerate(self._prompts[first:], first)
        ]
        self._rounds += bool(asks)
        return asks

    def result(self) -> SelectionResult:
        wanted, keep = (
            self.selector.rollout.prompts_per_step,
            False,
        )
        groups = [self._groups[index] for index in sorted(self._groups)]
        mixed = [*self.kept, *(group for group in groups if kind_of(group) is Kind.MIXED)]
        beyond = {group.group_id for group in mixed[wanted:]}
        surplus = tuple(mixed[wanted:])
        self.selector.kept = list(surplus) if keep else []
        self._note(groups, min(len(mixed), wanted), len(surplus))
        used = tuple(group for group in (*self.kept, *groups) if group.group_id not in beyond)
        return SelectionResult(used, surplus=() if keep else surplus)

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def _mixed(self) -> int:
        return len(self.kept) + sum(kind_of(group) is Kind.MIXED for group in self._groups.values())

    def _note(self, groups: list[Group], used: int, surplus: int) -> None:
        told = [group for group in groups if kind_of(group) is not Kind.TOO_FEW_VERDICTS]
        mixed = sum(kind_of(group) is Kind.MIXED for group in told)
        wanted, samples = (
            self.selector.rollout.prompts_per_step,
            self.selector.rollout.samples_per_prompt,
        )
        self._metrics = {
            "select/observed_mixed": mixed / max(len(told), 1),
            "select/prompts": float(len(groups)),
            "select/rollouts": float(samples * len(groups)),
            "select/mixed": float(used),
            "select/unfilled": float(wanted - used),
            "select/surplus": float(surplus),
            "select/kept": float(len(self.kept)),
            "select/rounds": float(self._rounds),
        }
