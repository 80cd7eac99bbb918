"""Progress lines for people: one line for each step, and one for each long task."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from megatron_rl.records.reminder import FIRST_SECONDS, growing_intervals

_GROUP_KINDS = {
    "all_incorrect": "all incorrect",
    "all_correct": "all correct",
    "tied_incorrect": "tied incorrect",
    "tied_correct": "tied correct",
    "tied_reward": "with equal rewards",
    "too_few_verdicts": "with fewer than two verdicts",
}
# Of "[ 123.4 s] "
_TIME_WIDTH = 12
# The step line names the largest classes of tokens only, to stay short
_MAX_TOKEN_CLASSES = 4


class Progress:
    """Prints progress lines to `stream`, by default standard output.

    It prints nothing when `is_enabled` is false, or once the stream cannot be written any more.
    """

    def __init__(self, total_steps: int, *, is_enabled: bool, stream: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._is_enabled = is_enabled
        self._stream = stream if stream is not None else sys.stdout
        self._start = time.monotonic()

    def log(self, text: str) -> None:
        """Print one line, after the seconds since the start."""
        if self._is_enabled:
            seconds = time.monotonic() - self._start
            self._is_enabled = print_line(f"[{seconds:6.1f} s] {text}", self._stream)

    @contextlib.contextmanager
    def task(self, name: str, *, first_seconds: float = FIRST_SECONDS) -> Iterator[None]:
        """Log how long the body has taken: after `first_seconds`, then at growing intervals."""
        end = threading.Event()
        start = time.monotonic()

        def remind() -> None:
            for interval in growing_intervals(first_seconds):
                if end.wait(interval):
                    return
                self.log(f"{name}: {time.monotonic() - start:.0f} s so far")

        reminder = threading.Thread(target=remind, daemon=True)
        reminder.start()
        try:
            yield
        finally:
            end.set()
            # Without this, a reminder could be printed after the task
            reminder.join()

    def log_step(self, step: int, values: Mapping[str, float], *, is_sampled: bool = True) -> None:
        """Log the main metrics of one step. is_sampled: False for rollouts of a recording.

        On a terminal, a line that is too wide loses its details, until it fits.
        """
        times = " ".join(
            f"{name} {values[f'time/{name}']:.1f}"
            for name in ("rollout", "old_policy", "train", "next_rollouts", "sync", "record")
            if f"time/{name}" in values
        )
        reward_and_tokens = describe_batch(values, is_sampled=is_sampled)
        update = describe_update(values)
        shares = describe_tokens(values)
        seconds = f"{values['time/step']:.1f} s"
        parts = [
            f"step {step}/{self._total_steps}",
            *reward_and_tokens,
            *describe_losses(values),
            *update,
            *shares,
            f"{seconds} ({times})",
        ]
        width = self._width()
        if width is not None:
            details = {parts[-1]: seconds} | dict.fromkeys(
                [*shares, *reward_and_tokens[1:], *reversed(update[1:])], ""
            )
            parts = _fit(parts, details, width)
        self.log(" | ".join(parts))

    def _width(self) -> int | None:
        """The characters that a line may have after its time; None if no terminal shows it."""
        try:
            is_terminal = self._stream.isatty()
        except ValueError:  # it is closed
            return None
        return shutil.get_terminal_size().columns - _TIME_WIDTH if is_terminal else None


def _fit(parts: Sequence[str], details: Mapping[str, str], width: int) -> list[str]:
    """Replace details, in order, by their shorter texts until the line fits; "" leaves one out."""
    result = list(parts)
    for detail, shorter in details.items():
        if len(" | ".join(result)) <= width:
            break
        result = [shorter if part == detail else part for part in result]
        result = [part for part in result if part]
    return result


def print_line(text: str, stream: TextIO | None = None) -> bool:
    """Print one line and flush it. Lines of several processes are not mixed, also not when
    PYTHONUNBUFFERED is set: the line and its end are one write.

    Returns False when the stream cannot be written, for example because its reader (`| head`) has
    ended. That must not end a run: later output goes to /dev/null. Characters that the stream's
    encoding does not have are written as escapes.
    """
    stream = sys.stdout if stream is None else stream
    escape_unencodable(stream)
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except (OSError, ValueError):
        # Python flushes the buffered text again at exit, which would fail again
        with contextlib.suppress(OSError, ValueError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
        return False
    return True


def escape_unencodable(stream: TextIO) -> None:
    """Let a stream write characters that its encoding does not have as escapes, not raise."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def describe_batch(values: Mapping[str, float], *, is_sampled: bool) -> list[str]:
    """The reward and the tokens of a step."""
    if _is_supervised(values):
        return [f"{values.get('account/demonstrated', 0.0):.0f} tokens of demonstrations"]
    reward = f"reward {values['reward/mean']:.3g}" if "reward/mean" in values else "no reward"
    tokens = values["rollout/tokens"]
    if not is_sampled:
        return [reward, f"{tokens:.0f} recorded tokens"]
    if values.get("rollout/age/max", 0.0):
        return [reward, f"{tokens:.0f} tokens of age {values['rollout/age/mean']:.2g}"]
    rollout_seconds = values.get("time/rollout", 0.0)
    tokens_per_second = tokens / rollout_seconds if rollout_seconds else 0.0
    return [reward, f"{tokens:.0f} tokens at {tokens_per_second:.0f}/s"]


def describe_losses(values: Mapping[str, float]) -> list[str]:
    """The rejected rollouts of a step with their reasons, and those without a verdict."""
    parts = []
    rejections = values.get("rollout/rejected", 0.0)
    if rejections:
        counts = _with_prefix(values, "rollout/rejected/")
        by_count = sorted(counts.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{count:.0f} {reason}" for reason, count in by_count)
        total = rejections + values.get("rollout/samples", 0.0)
        parts.append(f"lost {rejections:.0f} of {total:.0f} rollouts ({reasons})")
    without_verdict = values.get("reward/no_verdict", 0.0)
    if without_verdict:
        parts.append(f"{without_verdict:.0f} without a verdict")
    return parts


def describe_update(values: Mapping[str, float]) -> list[str]:
    """The optimizer's view of a step, or the reason why nothing was trained."""
    if not values.get("train/samples", 1.0):
        return [f"nothing trained: {describe_untrained_groups(values)}"]
    parts = []
    if not _is_supervised(values):
        parts.append(f"zero-variance {values.get('rollout/zero_variance_rate', 0.0):.0%}")
    for name in ("nll", "entropy"):
        if f"policy/{name}" in values:
            parts.append(f"{name} {values[f'policy/{name}']:.3f}")
    if values.get("train/nonfinite"):
        parts.append("no update: NaN or Inf")
    elif "guard/spike_norm" in values:
        parts.append(f"spike: grad {values['guard/spike_norm']:.2f}")
    elif "train/grad_norm" in values:
        parts.append(f"grad {values['train/grad_norm']:.2f}")
    return parts


def describe_tokens(values: Mapping[str, float]) -> list[str]:
    """The largest shares of a step's tokens by their use. Empty when tokens were not accounted."""
    tokens = {name: count for name, count in _with_prefix(values, "account/").items() if count > 0}
    total = tokens.pop("generated", 0.0)
    if not total:
        return []
    for name in ("evaluation", "engine_tokens", "demonstrated", "unfinished"):
        tokens.pop(name, None)
    by_count = sorted(tokens.items(), key=lambda item: (-item[1], item[0]))
    shares = []
    for name, count in by_count[:_MAX_TOKEN_CLASSES]:
        label = name.removeprefix("trained/").replace("_", " ")
        shares.append(f"{count / total:.0%} {label}")
    return [f"tokens: {', '.join(shares)}"]


def _is_supervised(values: Mapping[str, float]) -> bool:
    """True for a step whose rollouts are demonstrations: no engine sampled a token."""
    return values.get("rollout/samples", 0.0) > 0 and not values.get("rollout/tokens")


def describe_untrained_groups(values: Mapping[str, float]) -> str:
    """The groups of a step without an update, by kind."""
    counts = {kind: values.get(f"rollout/groups/{kind}", 0.0) for kind in _GROUP_KINDS}
    num_mixed = values.get("rollout/groups/mixed", 0.0)
    kinds = [f"{count:.0f} {_GROUP_KINDS[kind]}" for kind, count in counts.items() if count]
    total = num_mixed + sum(counts.values())
    if not total:
        return "the selection stopped all probes"
    # Mixed groups have no trainable token when every response was cut and train_truncated=false,
    # or when their rewards are equal
    if num_mixed:
        cut_share = values.get("rollout/truncated", 0.0)
        cuts = f"{cut_share:.0%} of all responses cut at rollout.max_new_tokens"
        parts = [f"{num_mixed:.0f} mixed without a trainable token", cuts, *kinds]
        return f"{total:.0f} groups ({', '.join(parts)})"
    problem = "have no learning signal" if counts["too_few_verdicts"] else "have zero variance"
    return f"all {total:.0f} groups {problem} ({', '.join(kinds)})"


def _with_prefix(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The metrics whose names begin with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
