"""Dynamic sampling (DAPO, arXiv 2503.14476, 3.2): whole groups until enough of them are mixed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_rl.config.schema import RolloutSettings, SelectionSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult
from megatron_rl.prompts.source import PromptSource


@dataclass(frozen=True)
class Oversample:
    """Samples rounds of `rollout.prompts_per_step` prompts, in the source's order.

    A round begins after all groups of the previous round have arrived. With `surplus=abort`, the
    step ends with the shortest prefix of the requests that has enough mixed groups. It does not
    depend on the order in which groups arrive. See `Selector`.
    """

    source: PromptSource
    rollout: RolloutSettings
    settings: SelectionSettings
    ignores_rollouts: ClassVar[bool] = False

    def select(self, step: int) -> OversampleStep:
        self.source.begin_step()
        return OversampleStep(self)

    def state(self) -> SelectorState:
        return SelectorState(prompts=self.source.cursor)

    def restore(self, state: SelectorState) -> None:
        self.source.seek(state.prompts)

    def inflate_variance(self) -> None:
        """Do nothing: there are no beliefs."""


@dataclass
class OversampleStep:
    """Selection of one step. See `StepSelection`."""

    selector: Oversample
    _prompts: list[Prompt] = field(default_factory=list, init=False)
    _groups: dict[int, Group] = field(default_factory=dict, init=False)
    _prefix: int = field(default=0, init=False)  # groups without a gap, from the first on
    _num_mixed_in_prefix: int = field(default=0, init=False)
    _num_rounds: int = field(default=0, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)

    def first_round(self) -> list[RolloutRequest]:
        return self.next_round()

    def handle_group(self, index: int, group: Group) -> RolloutRequest | None:
        self._groups[index] = group
        while not self._is_filled and self._prefix in self._groups:
            self._num_mixed_in_prefix += kind_of(self._groups[self._prefix]) is GroupKind.MIXED
            self._prefix += 1
        return None

    def num_needed(self) -> int | None:
        is_decided = self._is_filled and self.selector.settings.surplus == "abort"
        return self._prefix if is_decided else None

    def forget_group(self, index: int) -> None:
        del self._groups[index]

    def next_round(self) -> list[RolloutRequest]:
        num_mixed = sum(kind_of(group) is GroupKind.MIXED for group in self._groups.values())
        if num_mixed >= self._prompts_per_step or not self._has_budget():
            return []
        first_index = len(self._prompts)
        self._offer_prompts()
        requests = [
            RolloutRequest(index, prompt, self.selector.rollout.samples_per_prompt)
            for index, prompt in enumerate(self._prompts[first_index:], first_index)
        ]
        self._num_rounds += bool(requests)
        return requests

    def result(self) -> SelectionResult:
        indices = sorted(self._groups)[: self.num_needed()]
        groups = [self._groups[index] for index in indices]
        mixed_groups = [group for group in groups if kind_of(group) is GroupKind.MIXED]
        surplus_groups = tuple(mixed_groups[self._prompts_per_step :])
        surplus_ids = {group.group_id for group in surplus_groups}
        num_unneeded = 0 if self.num_needed() is None else len(self._prompts) - len(groups)
        num_surplus = len(surplus_groups) + num_unneeded
        self._set_metrics(groups, len(mixed_groups) - len(surplus_groups), num_surplus)
        return SelectionResult(
            tuple(group for group in groups if group.group_id not in surplus_ids),
            surplus_groups=surplus_groups,
        )

    def metrics(self) -> dict[str, float]:
        return self._metrics

    @property
    def _is_filled(self) -> bool:
        """True if the prefix has enough mixed groups."""
        return self._num_mixed_in_prefix >= self._prompts_per_step

    @property
    def _prompts_per_step(self) -> int:
        return self.selector.rollout.prompts_per_step

    def _has_budget(self) -> bool:
        budget = self.selector.settings.budget * self._prompts_per_step
        return len(self._prompts) + self._prompts_per_step <= budget

    def _offer_prompts(self) -> None:
        """Add the prompts of a round, fewer if the step has sampled all prompts."""
        ids = {prompt.id for prompt in self._prompts}
        for _ in range(self._prompts_per_step):
            offer = self.selector.source.offer(ids)
            if offer is None:
                break
            prompt, _ = offer
            self._prompts.append(prompt)
            ids.add(prompt.id)

    def _set_metrics(self, groups: list[Group], num_used: int, num_surplus: int) -> None:
        kinds = [kind_of(group) for group in groups]
        num_with_verdicts = sum(kind is not GroupKind.TOO_FEW_VERDICTS for kind in kinds)
        num_mixed = sum(kind is GroupKind.MIXED for kind in kinds)
        num_prompts = len(self._prompts)
        self._metrics = {
            "select/observed_mixed": num_mixed / max(num_with_verdicts, 1),
            "select/prompts": float(num_prompts),
            "select/rollouts": float(num_prompts * self.selector.rollout.samples_per_prompt),
            "select/mixed": float(num_used),
            "select/unfilled": float(self._prompts_per_step - num_used),
            "select/surplus": float(num_surplus),
            "select/rounds": float(self._num_rounds),
        }
