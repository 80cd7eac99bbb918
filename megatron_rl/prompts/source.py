"""Endless, seeded stream of training prompts, with a fixed tuple of held-out prompts."""

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

_Range = tuple[float, float] | None


@dataclass(frozen=True)
class ExcludedRows:
    """Rows that are not used.

    bad: number of malformed or unusable rows.
    duplicates: number of repeated questions.
    overlapping: number of training rows whose question is held out.
    num_reserved: number of questions that another data.num_eval holds out. `messages` leaves them
    out.
    examples: the first bad rows, as `origin: reason`.
    messages: the first of all these rows, as `origin: reason`.
    """

    bad: int = 0
    duplicates: int = 0
    overlapping: int = 0
    num_reserved: int = 0
    examples: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return self.bad + self.duplicates + self.overlapping

    def __str__(self) -> str:
        reserve = f", {self.num_reserved} reserved for evaluation" if self.num_reserved else ""
        return (
            f"not used: {self.bad} bad rows, {self.duplicates} duplicates, {self.overlapping} that "
            f"are also held out{reserve}"
        )

    def report(self) -> str:
        """Return a text with one line for each row, "" without such rows."""
        if not self.messages:
            return ""
        lines = [str(self), *self.messages]
        num_more = self.count - len(self.messages)
        if num_more > 0:
            lines.append(f"... and {num_more} more")
        return "\n".join(lines) + "\n"


class PromptSource:
    """Stream of training prompts, each once per epoch.

    train, held_out: all prompts of each side.
    excluded_rows: rows that are in neither side.
    rates: estimated pass rates by prompt id. A pass-rate range excludes prompts from `take` and
    `offer`. It may change between two steps: the current epoch then skips what is outside of
    it, and the next epoch goes only through the prompts in the range.
    initial_beliefs: beliefs of another run from which a new run starts, see `TransferredBeliefs`.

    name: of a source in a mixture, whose epochs have an order of their own.
    """

    def __init__(
        self,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
        settings: DataSettings,
        excluded_rows: ExcludedRows | None = None,
        rates: Mapping[str, PassRate] | None = None,
        *,
        name: str = "",
    ) -> None:
        self.train = tuple(train)
        self.held_out = tuple(held_out)
        self.excluded_rows = excluded_rows or ExcludedRows()
        self.rates: Mapping[str, PassRate] = rates or {}
        self.initial_beliefs: BeliefState | None = None
        self._settings = settings
        self._name = name
        self._epoch = 0
        self._position = 0
        self._order: Sequence[int] = ()
        self._postponed_indices: deque[int] = deque()
        # Prompts that the current step cannot take twice, as an ordered set: a step may go through
        # many epochs.
        self._repeated_indices: dict[int, None] = {}
        self._pass_rate_range: _Range = None
        self._epoch_range: _Range = None
        self._range_digest = ""
        self._available_indices: Collection[int] = ()
        self.set_pass_rate_range(settings.pass_rate_range)

    @property
    def num_available(self) -> int:
        """Number of training prompts in the pass-rate range."""
        return len(self._available_indices)

    def set_pass_rate_range(self, pass_rate_range: Sequence[float] | None) -> None:
        """Offer only prompts whose pass rate lies in [low, high] from now on. None: all prompts."""
        self._pass_rate_range = None
        if pass_rate_range is not None:
            low, high = pass_rate_range
            self._pass_rate_range = (low, high)
        self._available_indices = self._indices_in(self._pass_rate_range)
        if self._position == 0:
            self._begin_epoch(self._epoch)

    def notes(self) -> tuple[str, str, str]:
        """Return notes for the log about excluded rows, pass rates and initial beliefs.

        A note is "" if there are no rates or no beliefs.
        """
        return str(self.excluded_rows), self._rates_note(), self._beliefs_note()

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` training prompts, all different, across the ends of epochs.

        Raises `PromptDataError` if there are not as many.
        """
        self.require(n)
        self.begin_step()
        prompts: dict[str, Prompt] = {}
        while len(prompts) < n:
            offer = self.offer(prompts)
            assert offer is not None, "`require` has counted the prompts"
            prompt, _ = offer
            prompts[prompt.id] = prompt
        return list(prompts.values())

    def begin_step(self) -> None:
        """Begin a step. Prompts that the previous step could not take twice come first."""
        self._postponed_indices.extendleft(reversed(self._repeated_indices))
        self._repeated_indices = {}

    def offer(self, ids_of_step: Collection[str]) -> tuple[Prompt, int] | None:
        """Return the next training prompt and its epoch, or None if the step has all prompts.

        Each prompt is offered once per epoch, across the ends of epochs.

        ids_of_step: ids that the step has already. Their prompts are postponed to the next step,
        each once.
        """
        if len(ids_of_step) >= self.num_available:
            return None
        index = self._next_index()
        while self.train[index].id in ids_of_step:
            self._repeated_indices[index] = None
            index = self._next_index()
        return self.train[index], self._epoch

    @property
    def cursor(self) -> PromptCursor:
        """Position in the stream, which `seek` takes."""
        return PromptCursor(
            epoch=self._epoch,
            position=self._position,
            postponed_indices=(*self._repeated_indices, *self._postponed_indices),
            digest=self._digest,
            epoch_range=self._epoch_range,
            range_digest=self._range_digest,
        )

    def seek(self, cursor: PromptCursor) -> None:
        """Continue after the prompts that an earlier run has taken.

        Raises `PromptDataError` if that run had other prompts, or other ones in its range.
        """
        if cursor.digest != self._digest:
            raise PromptDataError(
                f"run.resume: the checkpoint's run had other training prompts than the "
                f"{len(self.train)} here. Give it the same data.*, files and chat template, or "
                "start another run. If none of these changed and rows have `messages`, another "
                "version of the trainer saved the checkpoint: it splits chats by the text that the "
                "template renders, this version by their messages. Resume with that version, or "
                "export the checkpoint (python launch/checkpoint.py export) and start another run "
                "from it"
            )
        indices = self._indices_in(cursor.epoch_range)
        range_digest = _digest_of_range(indices, cursor.epoch_range)
        if cursor.range_digest and cursor.range_digest != range_digest:
            raise PromptDataError(
                "data.pass_rates: the file has other rates than in the checkpoint's run, so that "
                f"the range {list(cursor.epoch_range or ())} holds other prompts. Give the old "
                "file, or start another run"
            )
        self._epoch = cursor.epoch
        self._position = cursor.position
        self._postponed_indices = deque(cursor.postponed_indices)
        self._repeated_indices = {}
        self._epoch_range = cursor.epoch_range
        self._range_digest = range_digest
        self._order = self._shuffle_epoch(indices)

    def require(self, n: int) -> None:
        """Raise `PromptDataError` unless there are `n` different prompts for a step."""
        if self._pass_rate_range is not None and n > self.num_available:
            raise PromptDataError(
                f"data.pass_rate_range={list(self._pass_rate_range)}: it leaves "
                f"{self.num_available} prompts, but a step needs rollout.prompts_per_step={n} "
                f"different ones ({self._rates_note()}). Widen the range, lower "
                "rollout.prompts_per_step, or give more training data"
            )
        if n > len(self.train):
            raise PromptDataError(
                f"rollout.prompts_per_step={n}: there are only {len(self.train)} usable training "
                "prompts, and a step samples no prompt twice. Lower it, or give more training data"
            )

    def _rates_note(self) -> str:
        if not self.rates:
            return ""
        ids = {prompt.id for prompt in self.train}
        rates = [self.rates.get(prompt.id) for prompt in self.train]
        num_known = sum(rate is not None and rate.samples > 0 for rate in rates)
        num_unknown_ids = sum(prompt_id not in ids for prompt_id in self.rates)
        note = (
            f"pass rates: of {num_known} of {len(ids)} training prompts, and of {num_unknown_ids} "
            "unknown ids"
        )
        if self._pass_rate_range is None:
            return note
        pass_rate_range = list(self._pass_rate_range)
        return f"{note}; {self.num_available} in data.pass_rate_range={pass_rate_range}"

    def _beliefs_note(self) -> str:
        if self.initial_beliefs is None:
            return ""
        ids = {prompt.id for prompt in self.train}
        num_known = len(ids & set(self.initial_beliefs.prompts))
        num_others = len(self.initial_beliefs.prompts) - num_known
        note = (
            f"beliefs: about {num_known} of {len(self.train)} training prompts, and about "
            f"{num_others} others"
        )
        if 2 * num_known < len(self.train):
            note += "; fewer than half are known, and the others start from their stratum"
        return note

    def _next_index(self) -> int:
        index = self._next_index_of_all()
        while index not in self._available_indices:
            index = self._next_index_of_all()
        return index

    def _next_index_of_all(self) -> int:
        if self._postponed_indices:
            return self._postponed_indices.popleft()
        while self._position >= len(self._order):
            self._begin_epoch(self._epoch + 1)
        self._position += 1
        return self._order[self._position - 1]

    @cached_property
    def _digest(self) -> str:
        """Digest of the prompts and their order, to which a cursor belongs."""
        settings = self._settings
        digest = hashlib.sha256(f"{settings.seed}/{settings.shuffle}".encode())
        for prompt in self.train:
            digest.update(f"\n{prompt.id}\t{prompt.token_ids}".encode())
        return digest.hexdigest()

    def _indices_in(self, pass_rate_range: _Range) -> Collection[int]:
        """Return the ascending indices of the prompts in a range, with fast membership tests."""
        if pass_rate_range is None:
            return range(len(self.train))
        low, high = pass_rate_range
        ids = {id_ for id_, rate in self.rates.items() if rate.within(low, high)}
        return {index: None for index, prompt in enumerate(self.train) if prompt.id in ids}

    def _begin_epoch(self, epoch: int) -> None:
        """Begin an epoch of the prompts in the pass-rate range."""
        self._epoch = epoch
        self._position = 0
        self._epoch_range = self._pass_rate_range
        self._range_digest = _digest_of_range(self._available_indices, self._epoch_range)
        self._order = self._shuffle_epoch(self._available_indices)

    def _shuffle_epoch(self, indices: Collection[int]) -> list[int]:
        order = list(indices)
        if self._settings.shuffle:
            seed = f"{self._settings.seed}/{self._epoch}"
            random.Random(f"{seed}/{self._name}" if self._name else seed).shuffle(order)
        return order


def _digest_of_range(indices: Collection[int], pass_rate_range: _Range) -> str:
    """Return a digest of the prompts of a pass, "" for all prompts."""
    if pass_rate_range is None:
        return ""
    return hashlib.sha256(str(list(indices)).encode()).hexdigest()
