"""The lengths that rollouts had, and those that are expected."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from megatron_rl.contracts.prompt import Prompt

# Later rollouts of a prompt or a task change its mean as if it had no more of them. A policy that
# learns writes responses of other lengths.
_PROMPT_MEMORY = 64
_TASK_MEMORY = 4096
# Weight of a task's mean among the rollouts of a prompt, in rollouts
_TASK_WEIGHT = 1.0
_MAX_LOG_TOKENS = math.log(1e9)


class MeanState(msgspec.Struct, frozen=True, kw_only=True):
    """Means of logarithms, as a checkpoint has them.

    names: of prompts or tasks. means, counts: float64 [n], their rows.
    """

    names: tuple[str, ...] = ()
    means: bytes = b""
    counts: bytes = b""


class LogMeans:
    """The mean logarithm of the tokens of rollouts, by name of a prompt or a task.

    memory: the largest number of rollouts that a mean stands for.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._rows: dict[str, int] = {}
        self._means: list[float] = []
        self._counts: list[float] = []

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def find(self, name: str) -> tuple[float, float]:
        """Return mean and count, zeros for a name without rollouts."""
        row = self._rows.get(name)
        return (0.0, 0.0) if row is None else (self._means[row], self._counts[row])

    def mean(self) -> float | None:
        """Return the mean over all names, None without one."""
        return sum(self._means) / len(self._means) if self._means else None

    def add(self, name: str, log_tokens: float, count: float = 1.0) -> None:
        """Add `count` rollouts of this length."""
        mean, earlier_count = self.find(name)
        row = self._rows.setdefault(name, len(self._rows))
        if row == len(self._means):
            self._means.append(0.0)
            self._counts.append(0.0)
        total = earlier_count + count
        self._means[row] = mean + (log_tokens - mean) * count / total
        self._counts[row] = min(total, self._memory)

    def state(self) -> MeanState:
        """Return what `restore` takes."""
        return MeanState(
            names=tuple(self._rows),
            means=np.array(self._means, np.float64).tobytes(),
            counts=np.array(self._counts, np.float64).tobytes(),
        )

    def restore(self, state: MeanState) -> None:
        """Replace all means. Raises `msgspec.ValidationError` for a damaged state."""
        size = 8 * len(state.names)
        if (len(state.means), len(state.counts)) != (size, size):
            raise msgspec.ValidationError(
                f"its means and counts do not have {len(state.names)} rows, one for each name"
            )
        means = np.frombuffer(state.means, np.float64)
        counts = np.frombuffer(state.counts, np.float64)
        is_valid = (means >= 0) & (means <= _MAX_LOG_TOKENS) & (counts > 0) & np.isfinite(counts)
        if not is_valid.all():
            row = int(np.argmin(is_valid))
            raise msgspec.ValidationError(
                f"{state.names[row]!r} has mean={means[row]:g} and count={counts[row]:g}. A mean "
                f"logarithm lies between 0 and {_MAX_LOG_TOKENS:.1f}, and a count is positive"
            )
        self._rows = {name: row for row, name in enumerate(state.names)}
        if len(self._rows) != len(state.names):
            raise msgspec.ValidationError("a name appears twice")
        self._means = means.tolist()
        self._counts = counts.tolist()


class LengthState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a `LengthHistory`."""

    prompts: MeanState = MeanState()
    tasks: MeanState = MeanState()


class LengthHistory:
    """The tokens that rollouts had, and those that are expected for others of the same prompt.

    The mean logarithm of a prompt's rollouts is drawn towards that of its task. A prompt without
    rollouts has the mean of its task, or of all tasks.
    """

    def __init__(self) -> None:
        self._prompts = LogMeans(_PROMPT_MEMORY)
        self._tasks = LogMeans(_TASK_MEMORY)

    def knows(self, prompt: Prompt) -> bool:
        """Return True if rollouts of this prompt have been measured."""
        return prompt.id in self._prompts

    def expected_log(self, prompt: Prompt) -> float | None:
        """Return the logarithm of the expected tokens, None if nothing is known."""
        mean, count = self._prompts.find(prompt.id)
        is_task_known = prompt.task in self._tasks
        task_mean = self._tasks.find(prompt.task)[0] if is_task_known else self._tasks.mean()
        if task_mean is None:
            return None
        return (count * mean + _TASK_WEIGHT * task_mean) / (count + _TASK_WEIGHT)

    def expected_tokens(self, prompt: Prompt) -> int:
        """Return the expected tokens of a rollout, 0 if nothing is known."""
        expected = self.expected_log(prompt)
        return 0 if expected is None else round(math.exp(expected))

    def add(self, prompt: Prompt, lengths: Iterable[tuple[int, bool]]) -> None:
        """Add the rollouts of a group.

        lengths: tokens of each, and whether a limit cut it off. One that was cut off counts as the
        expected length, if that is longer. A rollout without tokens does not count.
        """
        expected = self.expected_log(prompt) or 0.0
        for num_tokens, is_cut in lengths:
            if num_tokens:
                log_tokens = math.log(num_tokens)
                self.add_mean(prompt, max(log_tokens, expected) if is_cut else log_tokens)

    def add_mean(self, prompt: Prompt, log_tokens: float, count: float = 1.0) -> None:
        """Add `count` rollouts of a prompt with this mean logarithm of their tokens."""
        self._prompts.add(prompt.id, log_tokens, count)
        self._tasks.add(prompt.task, log_tokens, count)

    def state(self) -> LengthState:
        """Return what `restore` takes."""
        return LengthState(prompts=self._prompts.state(), tasks=self._tasks.state())

    def restore(self, state: LengthState) -> None:
        """Replace the history. Raises `msgspec.ValidationError` for a damaged state."""
        self._prompts.restore(state.prompts)
        self._tasks.restore(state.tasks)
