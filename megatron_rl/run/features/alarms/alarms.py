"""Warnings that rank 0 derives from the metrics of each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.wire_types import Count

# A healthy range of (mean |A_t| of zero-variance groups) / (mean |A_t| of the other groups)
_MIN_ADVANTAGE_RATIO = 0.02
_MAX_ADVANTAGE_RATIO = 0.5
_WARN_AFTER_STEPS = 3
# Of KL(engine || trainer) in FP8 over that in bfloat16
_MAX_MISMATCH_RATIO = 5.0
# A request that ends just after the counters were read belongs to the next step
_MAX_UNACCOUNTED_SHARE = 0.01
_SUPERVISED_START = (
    "train on responses first with experiment=cold_start (docs/data.md, "
    '"From rows to reinforcement learning")'
)
_REMEDIES = {
    "all_incorrect": f"every answer is incorrect: {_SUPERVISED_START}, use easier questions, raise "
    "rollout.samples_per_prompt or rollout.max_new_tokens, start from a checkpoint that solves "
    "some questions, or check reward.answer",
    "all_correct": "every answer is correct: use harder questions",
    "tied_incorrect": "every answer is incorrect, and some repeat themselves: "
    f"{_SUPERVISED_START}, use easier questions, or set credit.tied=shape",
    "tied_correct": "every answer is correct, with different lengths: use harder questions, or "
    "set credit.tied=shape",
    "tied_reward": "all answers to a question have the same reward: check whether the reward "
    "distinguishes good answers from bad ones",
    "too_few_verdicts": "the reward fails, or rollouts are lost: see reward/no_verdict and "
    "rollout/rejected in metrics.jsonl, and raise reward.timeout_s if scoring takes longer",
    "mixed": "rewards differ within groups, but no token of them is trainable: raise "
    "rollout.max_new_tokens, or set rollout.train_truncated=true",
}

# The advice if no group of those steps was completed
_STOPPED_REMEDY = (
    "the selection stopped every probe, because the answers to each question are equally correct: "
    "use harder questions, or easier ones if reward/mean is low. If it is 0, "
    f"{_SUPERVISED_START}"
)


class ZeroVarianceBalanceAlarm:
    """Compares the mean |A_t| of tokens in zero-variance groups and of all other tokens."""

    def __init__(self) -> None:
        self._out_of_range = False

    def observe(self, values: Mapping[str, float]) -> str | None:
        """Read the metrics of one step.

        Returns a warning when the ratio leaves [0.02, 0.5], and None while it stays outside.
        """
        zero_variance = values.get("policy/advantage_zero_variance", 0.0)
        others = values.get("policy/advantage_mixed", 0.0)
        if not values.get("train/zero_variance_samples") or not others:
            return None
        ratio = zero_variance / others
        was_out_of_range = self._out_of_range
        self._out_of_range = not _MIN_ADVANTAGE_RATIO <= ratio <= _MAX_ADVANTAGE_RATIO
        if was_out_of_range or not self._out_of_range:
            return None
        if ratio < _MIN_ADVANTAGE_RATIO:
            advice = "They hardly change the policy: raise credit.zvp_alpha"
        else:
            advice = "They change the policy a lot: lower credit.zvp_alpha"
        return (
            f"warning: the advantages in zero-variance groups are {ratio:.3g} times those in "
            f"other groups (policy/advantage_zero_variance {zero_variance:.3g}, "
            f"policy/advantage_mixed {others:.3g}). {advice}"
        )


class MismatchState(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of mismatch/k3_kl over the steps whose engines were unquantized and in bfloat16.

    steps: their number.
    """

    steps: Count = 0
    k3_sum: float = 0.0


class MismatchAlarm:
    """Compares the mismatches of quantized engines and of bfloat16 engines.

    The latter was measured in earlier steps of the same run, before it was resumed with quantized
    engines.
    """

    def __init__(self, engine: EngineSettings) -> None:
        self._is_quantized = engine.quantization is not None
        self._is_bf16 = engine.dtype == "bfloat16" and not self._is_quantized
        self.state = MismatchState()
        self._exceeds = False

    def metrics(self) -> dict[str, float]:
        """Return the mean of bfloat16 steps for runs whose engines are quantized now."""
        if not self._is_quantized or not self.state.steps:
            return {}
        return {"mismatch/bf16/k3_kl": self._bf16_mean}

    def observe(self, values: Mapping[str, float]) -> str | None:
        """Read the metrics of one step.

        Returns a warning when mismatch/k3_kl exceeds five times the value with bfloat16 engines,
        and None while it stays above.
        """
        mismatch = values.get("mismatch/k3_kl")
        if mismatch is None:
            return None
        if self._is_bf16 and 0 < mismatch < math.inf:
            old = self.state
            self.state = MismatchState(steps=old.steps + 1, k3_sum=old.k3_sum + mismatch)
        if not self._is_quantized or not self.state.steps:
            return None
        exceeded_before = self._exceeds
        ratio = mismatch / self._bf16_mean
        self._exceeds = not ratio <= _MAX_MISMATCH_RATIO  # also NaN
        if exceeded_before or not self._exceeds:
            return None
        return (
            f"warning: mismatch/k3_kl {mismatch:.3g} is {ratio:.3g} times its value with bfloat16 "
            f"engines ({self._bf16_mean:.3g}, the mean of {self.state.steps} earlier step(s) of "
            f"this run), above {_MAX_MISMATCH_RATIO:g} times. "
            "Check sync/audit_mismatches, keep layers unquantized "
            "(engine.unquantized_first_layers, engine.unquantized_last_layers), replay routes "
            "(train.replay=rollout), or use engine.quantization=null"
        )

    @property
    def _bf16_mean(self) -> float:
        return self.state.k3_sum / self.state.steps


class UnchangedWeightsAlarm:
    """Counts the steps that left the weights unchanged, and the kinds of their groups."""

    def __init__(self) -> None:
        self._steps = 0
        self._unchanged_steps = 0
        self._consecutive_steps = 0
        self._group_kinds: Counter[str] = Counter()

    def observe(self, values: Mapping[str, float]) -> str | None:
        """Read the metrics of one step.

        Returns a warning after 3 consecutive steps that trained nothing, and again after 6, 12,
        and so on.
        """
        self._steps += 1
        if values.get("train/samples", 1.0):
            self._consecutive_steps = 0
            return None
        self._unchanged_steps += 1
        self._consecutive_steps += 1
        for kind in _REMEDIES:
            self._group_kinds[kind] += int(values.get(f"rollout/groups/{kind}", 0.0))
        if not _is_doubling(self._consecutive_steps):
            return None
        return (
            f"warning: {self._consecutive_steps} consecutive steps trained nothing: "
            f"{self._remedy()}"
        )

    def summary(self) -> str | None:
        """Summarize the whole run; None when every step trained something."""
        if not self._unchanged_steps:
            return None
        return f"{self._unchanged_steps} of {self._steps} steps trained nothing: {self._remedy()}"

    def _remedy(self) -> str:
        """The advice for the most frequent kind of group in those steps."""
        most_frequent, count = self._group_kinds.most_common(1)[0]
        return _REMEDIES[most_frequent] if count else _STOPPED_REMEDY


class SelectionAlarm:
    """Watches the metrics under `select/`. It warns when a problem begins, not while it lasts."""

    def __init__(self) -> None:
        self._active: frozenset[str] = frozenset()

    def observe(self, values: Mapping[str, float]) -> str | None:
        """Read the metrics of one step; returns a warning, or None."""
        candidates = {
            "miscalibrated": _miscalibration_warning(values),
            "unfilled": _unfilled_warning(values),
        }
        problems = {name: text for name, text in candidates.items() if text}
        new_problems = [text for name, text in problems.items() if name not in self._active]
        self._active = frozenset(problems)
        return f"warning: {' '.join(new_problems)}" if new_problems else None


class AccountAlarm:
    """Compares the token account with the counts of the engines, or of the collectors."""

    def __init__(self) -> None:
        self._is_active = False

    def observe(self, values: Mapping[str, float]) -> str | None:
        """Read the metrics of one step.

        Returns a warning when more than a hundredth of the tokens that the engines counted is in no
        class, and None while it stays so. Without the engines' counts, every token must be in one.
        """
        unaccounted_tokens = values.get("account/unaccounted", 0.0)
        engine_tokens = values.get("account/engine_tokens")
        if engine_tokens is None:
            return _imbalance_warning(unaccounted_tokens, values.get("account/generated", 0.0))
        was_active = self._is_active
        self._is_active = abs(unaccounted_tokens) > _MAX_UNACCOUNTED_SHARE * engine_tokens
        if was_active or not self._is_active:
            return None
        return _uncounted_warning(unaccounted_tokens, engine_tokens)


def _imbalance_warning(unaccounted_tokens: float, generated_tokens: float) -> str | None:
    if not unaccounted_tokens:
        return None
    mistake = "in no class" if unaccounted_tokens > 0 else "counted twice"
    return (
        f"warning: {abs(unaccounted_tokens):.0f} of {generated_tokens:.0f} generated tokens are "
        f"{mistake} (account/unaccounted): the token account of this step is wrong. Training is "
        "not affected"
    )


def _uncounted_warning(unaccounted_tokens: float, engine_tokens: float) -> str:
    if unaccounted_tokens < 0:
        return (
            f"warning: the engines counted {-unaccounted_tokens:.0f} fewer tokens than the run "
            f"(account/engine_tokens {engine_tokens:.0f}). An engine was started again, or does "
            "not count every request. Training is not affected"
        )
    return (
        f"warning: {unaccounted_tokens:.0f} of {engine_tokens:.0f} tokens that the engines sampled "
        "are in no class (account/unaccounted). Requests ended without a reply: see "
        "rollout/rejected, logs/collector-*.log and logs/engine-*.log. Or another program uses the "
        "engines"
    )


def _is_doubling(steps: int) -> bool:
    """True for 3, 6, 12, 24, ... steps."""
    count, remainder = divmod(steps, _WARN_AFTER_STEPS)
    return remainder == 0 and count.bit_count() == 1


def _miscalibration_warning(values: Mapping[str, float]) -> str:
    difference = values.get("select/miscalibrated", 0.0)
    if not difference:
        return ""
    steps = values.get("select/calibration_steps", 1.0)
    period = "in the last step" if steps == 1 else f"over the last {steps:.0f} steps"
    return (
        f"{period} the observed share of mixed groups differed by {difference:.2f} from the "
        "predicted share (select/predicted_mixed, select/observed_mixed). The beliefs do not fit "
        "these prompts: use data with difficulty labels, or selection=oversample."
    )


def _unfilled_warning(values: Mapping[str, float]) -> str:
    missing = values.get("select/unfilled", 0.0)
    if not missing:
        return ""
    return (
        f"{missing:.0f} mixed groups are missing (select/unfilled), so this step trains on fewer. "
        "Raise selection.budget, or use other data."
    )
