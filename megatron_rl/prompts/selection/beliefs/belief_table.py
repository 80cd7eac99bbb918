"""Table of beliefs: one row for each prompt that was ever offered."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.belief_state import NEVER_SAMPLED

_MIN_CAPACITY = 64


class BeliefTable:
    """Arrays with one row for each prompt. Rows are only added.

    They may be longer than the number of rows.

    pool: ids of the prompts that can be offered. Rows of other prompts are kept for later runs.

    means, variances: float32, belief about ψ as of the prompt's last group.
    last_group_steps, declines: int32, see `BeliefState`.
    is_outside_pool: bool.
    """

    def __init__(self, pool: Collection[str] = ()) -> None:
        self._pool = frozenset(pool)
        self._row_by_id: dict[str, int] = {}
        # Every step needs the ids. They are rebuilt only if rows were added.
        self._ids: tuple[str, ...] = ()
        self.means: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        self.variances: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        self.last_group_steps: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.declines: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.is_outside_pool: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self._row_by_id)

    @property
    def ids(self) -> tuple[str, ...]:
        """Prompt ids in the order of the rows."""
        if len(self._ids) != len(self):
            self._ids = tuple(self._row_by_id)
        return self._ids

    @property
    def num_outside_pool(self) -> int:
        return int(self.is_outside_pool[: len(self)].sum())

    def find(self, prompt_id: str) -> int | None:
        """Return the row of a prompt, or None if it has none."""
        return self._row_by_id.get(prompt_id)

    def find_or_add(self, prompt_id: str) -> int:
        """Return the row of a prompt. A new prompt gets a row."""
        row = self._row_by_id.get(prompt_id)
        if row is not None:
            return row
        row = len(self)
        self._row_by_id[prompt_id] = row
        if row == len(self.means):
            self._grow(max(_MIN_CAPACITY, 2 * row))
        self.last_group_steps[row] = NEVER_SAMPLED
        self.declines[row] = 0
        self.is_outside_pool[row] = False
        return row

    def max_declines(self) -> int:
        """Return the largest number of declines of a prompt in the pool, 0 without a prompt."""
        count = len(self)
        declines = self.declines[:count][~self.is_outside_pool[:count]]
        return int(declines.max(initial=0))

    def restore(
        self,
        ids: tuple[str, ...],
        means: bytes,
        variances: bytes,
        last_group_steps: bytes,
        declines: bytes,
    ) -> None:
        """Replace all rows. declines: empty if all are 0."""
        self._row_by_id = {prompt_id: row for row, prompt_id in enumerate(ids)}
        self._ids = ids
        self.means = np.frombuffer(means, np.float32).copy()
        self.variances = np.frombuffer(variances, np.float32).copy()
        self.last_group_steps = np.frombuffer(last_group_steps, np.int32).copy()
        self.declines = np.zeros(len(ids), np.int32)
        if declines:
            self.declines[:] = np.frombuffer(declines, np.int32)
        is_outside_pool = [prompt_id not in self._pool for prompt_id in ids]
        self.is_outside_pool = np.array(is_outside_pool, np.bool_)

    def _grow(self, capacity: int) -> None:
        padding = (0, capacity - len(self.means))
        self.means = np.pad(self.means, padding)
        self.variances = np.pad(self.variances, padding)
        self.last_group_steps = np.pad(
            self.last_group_steps, padding, constant_values=NEVER_SAMPLED
        )
        self.declines = np.pad(self.declines, padding)
        self.is_outside_pool = np.pad(self.is_outside_pool, padding)
