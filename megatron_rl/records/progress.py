"""One line a step for a person to read."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

_PATIENCE_SECONDS = 10.0
_KINDS = {
    "all_incorrect": "wrong",
    "all_correct": "right",
    "tied_incorrect": "tied wrong",
    "tied_correct": "tied right",
    "tied_reward": "with equal rewards",
    "too_few_verdicts": "with fewer than two verdicts",
}
_NAMED_CLASSES = 4  # of what became of the tokens: a line is short


class Progress:
    """Prints to `stream` (standard output unless told otherwise); silent when not enabled, or once
    nobody reads.
    """

    def __init__(self, total_steps: int, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        if self._enabled:
            elapsed = time.monotonic() - self._start
            self._enabled = print_line(f"[{elapsed:6.1f} s] {text}", self._stream)

    @contextlib.contextmanager
    def during(self, what: str, *, every_seconds: float = _PATIENCE_SECONDS) -> Iterator[None]:
        """Say again and again that something which takes long is still under way."""
        done = threading.Event()
        start = time.monotonic()

        def remind() -> None:
            while not done.wait(every_seconds):
                self.say(f"{what}: {time.monotonic() - start:.0f} s so far")

        reminder = threading.Thread(target=remind, daemon=True)
        reminder.start()
        try:
            yield
        finally:
            done.set()
            reminder.join()  # it may be about to speak, and what is over is not under way

    def step(self, step: int, values: Mapping[str, float]) -> None:
        rollout_seconds = values.get("time/rollout", 0.0)
        rate = values["rollout/tokens"] / rollout_seconds if rollout_seconds else 0.0
        times = " ".join(
            f"{name} {values[f'time/{name}']:.1f}"
            for name in ("rollout", "old_policy", "train", "sync")
            if f"time/{name}" in values
        )
        parts = [
            f"step {step}/{self._total}",
            f"reward {values['reward/mean']:.3g}" if "reward/mean" in values else "no reward",
            f"{values['rollout/tokens']:.0f} tokens at {rate:.0f}/s",
            *lost_rollouts(values),
            *what_trained(values),
            *where_tokens_went(values),
            f"{values['time/step']:.1f} s ({times})",
        ]
        self.say(" | ".join(parts))


def print_line(text: str, stream: TextIO | None = None) -> bool:
    """Print and flush; False once nobody reads (`| head`) or nothing can be written, which must not
    end a run.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(
            OSError, ValueError
        ):  # what is buffered would fail again when Python ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return False
    return True


def lost_rollouts(values: Mapping[str, float]) -> list[str]:
    """How many rollouts of a step came to nothing, and why; empty when none."""
    rejected = values.get("rollout/rejected", 0.0)
    without = values.get("reward/no_verdict", 0.0)
    found = []
    if rejected:
        prefix = "rollout/rejected/"
        reasons = {
            name.removeprefix(prefix): n for name, n in values.items() if name.startswith(prefix)
        }
        named = ", ".join(
            f"{n:.0f} {reason}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1])
        )
        found.append(
            f"lost {rejected:.0f} of {rejected + values.get('rollout/samples', 0.0):.0f} rollouts ({named})"
        )
    return [*found, f"{without:.0f} without a verdict"] if without else found


def what_trained(values: Mapping[str, float]) -> list[str]:
    """What the optimizer saw of a step, or why it saw nothing."""
    if not values.get("train/samples", 1.0):
        return [f"nothing trained: {untrained_groups(values)}"]
    grad = values.get("train/grad_norm", math.nan)
    return [
        f"zero-variance {values.get('rollout/zero_variance_rate', 0.0):.0%}",
        f"entropy {values.get('policy/entropy', math.nan):.3f}",
        f"grad {grad:.2f}" if math.isfinite(grad) else "no update: NaN or Inf",
    ]


def where_tokens_went(values: Mapping[str, float]) -> list[str]:
    """Shares of the step's tokens by what became of them, the largest first; empty without an
    account.
    """
    prefix = "account/"
    tokens = {
        name.removeprefix(prefix): n
        for name, n in values.items()
        if name.startswith(prefix) and n > 0
    }
    total = tokens.pop("generated", 0.0)
    if not total:
        return []
    tokens.pop("evaluation", None)
    ordered = sorted(tokens.items(), key=lambda item: (-item[1], item[0]))[:_NAMED_CLASSES]
    named = (
        f"{n / total:.0%} {name.removeprefix('trained/').replace('_', ' ')}" for name, n in ordered
    )
    return [f"tokens: {', '.join(named)}"]


def untrained_groups(values: Mapping[str, float]) -> str:
    """The groups of a step by what they lack, such as `all 64 groups flat (63 wrong, 1 right)`."""
    groups = {kind: values.get(f"rollout/groups/{kind}", 0.0) for kind in ("mixed", *_KINDS)}
    total, mixed = sum(groups.values()), groups.pop("mixed")
    named = ", ".join(f"{count:.0f} {_KINDS[kind]}" for kind, count in groups.items() if count)
    # nothing in them may be trained: cut responses with train_truncated=false, or rewards that are
    # equal
    if mixed:
        cut = f"{values.get('rollout/truncated', 0.0):.0%} of all responses cut at rollout.max_new_tokens"
        named = ", ".join(
            filter(None, [f"{mixed:.0f} mixed ones without a token to train, {cut}", named])
        )
        return f"{total:.0f} groups ({named})"
    flat = total - groups["too_few_verdicts"]
    return f"all {total:.0f} groups {'flat' if flat == total else 'without a contrast'} ({named})"
