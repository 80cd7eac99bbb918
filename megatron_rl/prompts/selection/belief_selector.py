"""Asks seldom what is believed to teach nothing, and probes it first: what is solved, or with
skip=zero_variance hopeless too.

No choice depends on the order in which groups arrive
(tests/prompts/selection/test_belief_selector.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from megatron_rl.config.schema import RolloutSettings, SelectionSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.credit.group_kinds import Kind, kind_of
from megatron_rl.prompts.selection.acceptance import acceptance, coin
from megatron_rl.prompts.selection.belief import Beliefs
from megatron_rl.prompts.selection.calibration import Calibration
from megatron_rl.prompts.selection.importance_weights import effective_share, extension_weight
from megatron_rl.prompts.selection.selector import RolloutRequest, SelectionResult
from megatron_rl.prompts.source import PromptSource

_PASSES = 8  # over all prompts in one step: one that cannot be filled ends


@dataclass
class _Candidate:
    """One prompt of a step.

    first: rollouts asked of it first; chance: that those are mixed; samples: asked so far.
    """

    prompt: Prompt
    first: int
    chance: float
    samples: int
    rescued: bool = False
    group: Group | None = None
    opening: Kind | None = None  # of what was asked first
    kind: Kind | None = None

    @property
    def mixed(self) -> bool:
        return self.kind is Kind.MIXED


def first_counts(settings: SelectionSettings, full: int) -> tuple[int, int, int]:
    """Rollouts asked first: of a prompt that is believed to teach something, may do so, and hardly
    does.
    """
    probe = settings.probe_samples or full
    return full, probe, max(2, probe // 2) if probe < full else full


class BeliefSelector:
    """See `Selector` and docs/selection.md. seed: of the coins."""

    def __init__(
        self,
        source: PromptSource,
        rollout: RolloutSettings,
        settings: SelectionSettings,
        *,
        seed: int,
    ) -> None:
        self.source, self.rollout, self.settings, self.seed = source, rollout, settings, seed
        self.beliefs = Beliefs([prompt.id for prompt in source.train], source.rates)
        if source.beliefs is not None:
            self.beliefs.restore(source.beliefs)
        self.calibration = Calibration()

    def select(self, step: int) -> BeliefStep:
        self.source.begin_step()
        return BeliefStep(self, step)

    def state(self) -> SelectorState:
        return SelectorState(
            prompts=self.source.cursor, beliefs=self.beliefs.state(self.calibration.window)
        )

    def restore(self, state: SelectorState) -> None:
        """After a run that had no beliefs those that this one begins with stay."""
        self.source.seek(state.prompts)
        if state.beliefs is not None:
            self.beliefs.restore(state.beliefs)
            self.calibration = Calibration(deque(state.beliefs.window))

    def widen(self) -> None:
        """All beliefs lose their certainty: what pass rates were learnt from is no longer what is
        asked.
        """
        self.beliefs.widen()


@dataclass
class BeliefStep:
    """The choices of one step; see `StepSelection`."""

    selector: BeliefSelector
    step: int
    _asked: list[_Candidate] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)
    _offered: int = 0
    _accepted: float = 0.0  # sum of the probabilities with which prompts were taken
    _rounds: int = 0
    _metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings, rollout = self.selector.settings, self.selector.rollout
        self._full = rollout.samples_per_prompt
        self._wanted = rollout.prompts_per_step
        self._counts = first_counts(settings, self._full)
        self._outlook = self.selector.beliefs.outlook(self.step, self._counts)

    def begin(self) -> list[RolloutRequest]:
        asks = self._round(self._wanted)
        if not asks and (offered := self.selector.source.offer(self._ids)) is not None:
            self._ask(
                _Candidate(offered[0], self._full, 0.0, self._full)
            )  # a step asks something, whatever is believed
            return [RolloutRequest(0, offered[0], self._full)]
        return asks

    def answered(self, index: int, group: Group) -> RolloutRequest | None:
        asked = self._asked[index]
        asked.group, asked.kind = group, kind_of(group)
        asked.opening = asked.opening or asked.kind
        goes_on = asked.mixed or (
            asked.kind is Kind.ALL_INCORRECT and self.selector.settings.skip == "all_correct"
        )
        return self._extension(index) if asked.samples < self._full and goes_on else None

    def more(self) -> list[RolloutRequest]:
        mixed = sum(asked.mixed for asked in self._asked)
        if mixed >= self.selector.settings.expert.min_filled * self._wanted:
            return []
        return self._round(self._wanted - mixed)

    def result(self) -> SelectionResult:
        done = [(asked, asked.group) for asked in self._asked if asked.group is not None]
        self.selector.beliefs.observe(self.step, [group for _, group in done])
        stopped = tuple(group for asked, group in done if asked.samples < self._full)
        groups = tuple(
            self._weighed(asked, group) for asked, group in done if asked.samples == self._full
        )
        self._note(groups)
        return SelectionResult(groups, stopped)

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def _round(self, wanted: float) -> list[RolloutRequest]:
        """Prompts until so many mixed groups are expected, probes first: an extension is a second
        wait.

        A probe counts in full until it is answered, so that the budget holds whatever comes back.
        """
        source, first, expected = self.selector.source, len(self._asked), 0.0
        left = self._left()
        while (
            expected < wanted and left >= self._full and self._offered < _PASSES * len(source.train)
        ):
            offered = source.offer(self._ids)
            if offered is None:
                break
            self._offered += 1
            if (asked := self._considered(*offered)) is not None:
                self._ask(asked)
                expected += asked.chance
                left -= self._full
        asks = [
            RolloutRequest(i, asked.prompt, asked.samples)
            for i, asked in enumerate(self._asked[first:], first)
        ]
        self._rounds += bool(asks)
        return sorted(asks, key=lambda ask: ask.samples)

    def _left(self) -> float:
        """Rollouts that the step's budget still has."""
        asked = sum(asked.samples for asked in self._asked)
        return self.selector.settings.budget * self._wanted * self._full - asked

    def _ask(self, asked: _Candidate) -> None:
        self._ids.add(asked.prompt.id)
        self._asked.append(asked)

    def _considered(self, prompt: Prompt, epoch: int) -> _Candidate | None:
        """What to ask of an offered prompt, if anything."""
        selector = self.selector
        row = selector.beliefs.row(prompt, self.step)
        chances = self._outlook.of(prompt, row)
        worth = chances[0] if selector.settings.skip == "zero_variance" else chances[-1]
        taken = acceptance(worth, selector.beliefs.unseen_for(row, self.step), selector.settings)
        if coin(selector.seed, epoch, prompt.id) >= taken:
            return None
        self._accepted += taken
        target = selector.settings.expert.acceptance_target
        which = 0 if worth >= target else 1 if worth >= target / 2 else 2
        return _Candidate(prompt, self._counts[which], chances[which], self._counts[which])

    def _extension(self, index: int) -> RolloutRequest:
        asked = self._asked[index]
        have, asked.samples = asked.samples, self._full
        return RolloutRequest(index, asked.prompt, self._full - have, have)

    def _weighed(self, asked: _Candidate, group: Group) -> Group:
        if asked.first == self._full or asked.rescued or not asked.mixed:
            return group
        return msgspec.structs.replace(
            group, weight=extension_weight(group, asked.first, skip=self.selector.settings.skip)
        )

    def _note(self, groups: tuple[Group, ...]) -> None:
        """groups: those to be credited."""
        # An extension turns a probe into something else: it counts as what it was.
        told = [a for a in self._asked if a.opening not in (None, Kind.TOO_FEW_VERDICTS)]
        seen = sum(asked.opening is Kind.MIXED for asked in told)
        self.selector.calibration.add(sum(asked.chance for asked in told), seen, len(told))
        mixed, probes = (
            [g for g in groups if kind_of(g) is Kind.MIXED],
            [a for a in self._asked if a.first < self._full],
        )
        beliefs, count = self.selector.beliefs, max(len(self._asked), 1)
        missing = self._wanted - len(mixed)
        self._metrics = self.selector.calibration.metrics() | {
            "select/accept_rate": len(self._asked) / max(self._offered, 1),
            "select/acceptance": self._accepted / count,
            "select/age_max": float(beliefs.oldest(self.step)),
            "select/weight_ess": effective_share([group.weight for group in mixed]),
            "select/prompts": float(len(self._asked)),
            "select/rollouts": float(sum(asked.samples for asked in self._asked)),
            "select/mixed": float(len(mixed)),
            "select/unfilled": float(missing)
            if missing > (1 - self.selector.settings.expert.min_filled) * self._wanted
            else 0.0,
            "select/probes": float(len(probes)),
            "select/probes_extended": float(
                sum(a.samples == self._full and not a.rescued for a in probes)
            ),
            "select/rescued": float(sum(asked.rescued for asked in probes)),
            "select/rounds": float(self._rounds),
            "select/drift": beliefs.drift,
            "select/wander": beliefs.wander,
            "select/beliefs_aside": float(beliefs.aside),
        }
