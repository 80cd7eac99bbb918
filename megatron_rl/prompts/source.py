"""An endless, seeded stream of training prompts, beside a fixed tuple of held-out prompts."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import PromptCursor
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.question import PromptDataError


@dataclass(frozen=True)
class Excluded:
    """Rows that are not used. bad: malformed or unusable; examples: the first of them. duplicates:
    repeated questions. overlapping: training rows that are also held out. named: the first of all
    these, as `origin: reason`."""

    bad: int = 0
    duplicates: int = 0
    overlapping: int = 0
    examples: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"left out: {self.bad} bad rows, {self.duplicates} duplicates, {self.overlapping} that are also held out"

    def report(self) -> str:
        """The text of a file that names what was left out, a line each; empty when there is nothing
        to name.
        """
        if not self.named:
            return ""
        more = self.bad + self.duplicates + self.overlapping - len(self.named)
        rest = [f"... and {more} more"] if more > 0 else []
        return "\n".join([str(self), *self.named, *rest]) + "\n"


class PromptSource:
    """train, held_out: the prompts of each side; excluded: what was left out of both.

    rates: estimated pass rates by prompt id. A band of them leaves out of `take` what is not in it;
    `train`, the order and the cursor are those of all prompts, so that a band may change between
    two steps. beliefs: that a new run begins with, where another had some (see
    `TransferredBeliefs`).
    """

    def __init__(
        self,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
        settings: DataSettings,
        excluded: Excluded | None = None,
        rates: Mapping[str, PassRate] | None = None,
    ) -> None:
        self.train = tuple(train)
        self.held_out = tuple(held_out)
        self.excluded = excluded or Excluded()
        self._settings = settings
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()
        self._put_off: deque[int] = deque()
        self._repeated: dict[int, None] = {}  # each once: a step may go through many epochs
        self.rates: Mapping[str, PassRate] = rates or {}
        self.beliefs: BeliefState | None = None
        self._band: Sequence[float] | None = None
        self._outside: frozenset[int] = frozenset()
        self.choose(settings.pass_rate_range)

    @property
    def num_available(self) -> int:
        """How many training prompts there are to take: those in the band."""
        return len(self.train) - len(self._outside)

    def choose(self, band: Sequence[float] | None) -> None:
        """From now on take only prompts whose rate lies in [low, high]; None: all."""
        self._band, self._outside = band, frozenset[int]()
        if band is not None:
            low, high = band
            inside = {prompt_id for prompt_id, rate in self.rates.items() if rate.within(low, high)}
            self._outside = frozenset(
                i for i, prompt in enumerate(self.train) if prompt.id not in inside
            )

    def told(self) -> tuple[str, str, str]:
        """What was left out, and what is known of pass rates and believed of them, for people."""
        return str(self.excluded), self.report_rates(), self._report_beliefs()

    def report_rates(self) -> str:
        """How many prompts of each side of the file and of the band there are, for people; empty
        without rates.
        """
        if not self.rates:
            return ""
        known = {prompt.id for prompt in self.train}
        rated = sum(
            bool((rate := self.rates.get(prompt.id)) and rate.samples) for prompt in self.train
        )
        inside = (
            "" if self._band is None else f"; {self.num_available} in data.pass_rate_range={list(self._band)}"
        )
        strangers = sum(prompt_id not in known for prompt_id in self.rates)
        return f"pass rates: of {rated} of {len(known)} training prompts, and of {strangers} unknown ids{inside}"

    def _report_beliefs(self) -> str:
        """How many prompts a run that begins with another's beliefs knows; empty for any other."""
        if self.beliefs is None:
            return ""
        known = len({prompt.id for prompt in self.train} & set(self.beliefs.prompts))
        few = "; fewer than half are known, and the others begin as their stratum does"
        others = len(self.beliefs.prompts) - known
        told = f"beliefs: of {known} of {len(self.train)} training prompts, and of {others} others"
        return told + (few if 2 * known < len(self.train) else "")

    def take(self, n: int) -> list[Prompt]:
        """The next `n` training prompts, all different, across the ends of epochs."""
        self.require(n)
        self.begin_step()
        taken: dict[str, Prompt] = {}
        while len(taken) < n:
            offered = self.offer(taken)
            assert offered is not None, "there are n different ones"
            taken[offered[0].id] = offered[0]
        return list(taken.values())

    def begin_step(self) -> None:
        """What the step before could not ask twice comes first."""
        self._put_off.extendleft(reversed(self._repeated))
        self._repeated = {}

    def offer(self, asked: Collection[str]) -> tuple[Prompt, int] | None:
        """The next training prompt, and its epoch: each is offered once per epoch, across the ends
        of epochs.

        asked: ids that this step has asked; their prompts are put off to the next step, each once.
        None: it has asked all.
        """
        if len(asked) >= self.num_available:
            return None
        while self.train[index := self._next_index()].id in asked:
            self._repeated[index] = None
        return self.train[index], self._epoch

    @property
    def cursor(self) -> PromptCursor:
        """What was offered so far."""
        postponed_indices = (*self._repeated, *self._put_off)
        return PromptCursor(
            epoch=self._epoch, position=self._position, postponed_indices=postponed_indices, digest=self._digest
        )

    def seek(self, cursor: PromptCursor) -> None:
        """Go on behind what a run before had taken.

        Raises `PromptDataError` where that run had other prompts.
        """
        if cursor.digest != self._digest:
            raise PromptDataError(
                f"run.resume: the checkpoint's run had other training prompts than the {len(self.train)} here. Give it "
                "the same data.* and the same files, or start another run"
            )
        self._epoch, self._position = cursor.epoch, cursor.position
        self._put_off, self._repeated = deque(cursor.postponed_indices), {}
        self._order = self._epoch_order()

    def require(self, n: int) -> None:
        """Raise `PromptDataError` unless n prompts can be taken at once."""
        if self._band is not None and n > self.num_available:
            raise PromptDataError(
                f"data.pass_rate_range={list(self._band)}: it leaves {self.num_available} prompts, and "
                f"rollout.prompts_per_step={n} different ones are taken in a step ({self.report_rates()}). Widen the "
                "band, lower rollout.prompts_per_step, or give more training data"
            )
        if n > len(self.train):
            raise PromptDataError(
                f"rollout.prompts_per_step={n}: there are only {len(self.train)} usable training prompts, and no "
                "question is drawn twice in a step. Lower it, or give more training data"
            )

    def _next_index(self) -> int:
        while (index := self._next_of_all()) in self._outside:
            pass
        return index

    def _next_of_all(self) -> int:
        if self._put_off:
            return self._put_off.popleft()
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order()
        self._position += 1
        return self._order[self._position - 1]

    @cached_property
    def _digest(self) -> str:
        """Of which prompts in which order a cursor speaks."""
        named = "\n".join(f"{prompt.id}\t{prompt.token_ids}" for prompt in self.train)
        return hashlib.sha256(
            f"{self._settings.seed}/{self._settings.shuffle}\n{named}".encode()
        ).hexdigest()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self.train)))
        if self._settings.shuffle:
            random.Random(f"{self._settings.seed}/{self._epoch}").shuffle(order)
        return order
