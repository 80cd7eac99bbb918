"""An endless, seeded stream of training prompts with a cursor, beside a fixed tuple of held-out prompts."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from megatron_rl.contracts.numbers import Count
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.question import PromptDataError


@dataclass(frozen=True)
class Excluded:
    """Rows that are not used. bad: malformed or unusable; examples: the first of them. duplicates: repeated questions.
    overlapping: training rows that are also held out."""

    bad: int = 0
    duplicates: int = 0
    overlapping: int = 0
    examples: tuple[str, ...] = ()


class _Cursor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    epoch: Count
    position: Count
    put_off: tuple[Count, ...]
    fingerprint: str


class PromptSource:
    """train, held_out: the prompts of each side; excluded: what was left out of both."""

    def __init__(
        self,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        excluded: Excluded | None = None,
    ) -> None:
        if not train:
            raise PromptDataError("data.source: no usable training prompt is left")
        self.train = tuple(train)
        self.held_out = tuple(held_out)
        self.excluded = excluded or Excluded()
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()
        self._put_off: deque[int] = deque()

    def take(self, n: int) -> list[Prompt]:
        """The next `n` training prompts, all different, across the ends of epochs."""
        self.require(n)
        taken: dict[int, None] = {}
        repeated: list[int] = []
        while len(taken) < n:
            index = self._next_index()
            if index in taken:
                repeated.append(index)
            else:
                taken[index] = None
        self._put_off.extendleft(reversed(repeated))
        return [self.train[i] for i in taken]

    def require(self, n: int) -> None:
        """Raise `PromptDataError` unless n prompts can be taken at once."""
        if n > len(self.train):
            raise PromptDataError(
                f"rollout.prompts_per_step={n}: there are only {len(self.train)} usable training prompts, and no "
                "question is drawn twice in a step. Lower it, or give more training data"
            )

    def _next_index(self) -> int:
        if self._put_off:
            return self._put_off.popleft()
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order()
        self._position += 1
        return self._order[self._position - 1]

    def state(self) -> dict[str, int | str | list[int]]:
        """The cursor, as plain values that a checkpoint can hold. put_off: fewer indices than the largest take."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "put_off": list(self._put_off),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, int | str | list[int]]) -> None:
        """Continue where `state` was taken. Raises `PromptDataError` for a damaged state or the state of other data."""
        try:
            cursor = msgspec.convert(dict(state), _Cursor)
        except msgspec.ValidationError as error:
            raise _damaged(str(error)) from error
        if cursor.fingerprint != self._fingerprint:
            raise PromptDataError(
                "data: the checkpoint's cursor belongs to other prompts, another data.seed or another data.shuffle. "
                "Resume with the data the checkpoint was written with"
            )
        if cursor.position > len(self.train) or any(index >= len(self.train) for index in cursor.put_off):
            raise _damaged(f"it points beyond the {len(self.train)} training prompts")
        self._epoch, self._position, self._put_off = cursor.epoch, cursor.position, deque(cursor.put_off)
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self.train)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{self._seed}/{self._shuffle}".encode(), digest_size=16)
        for prompt in self.train:
            digest.update(f"\0{prompt.id}\0{prompt.answer}".encode("utf-8", "surrogatepass"))
            digest.update(repr(prompt.token_ids).encode())
        return digest.hexdigest()


def _damaged(reason: str) -> PromptDataError:
    return PromptDataError(f"data: the checkpoint's cursor is damaged ({reason}): use another one")
