"""mode=profile: rank 0 estimates the pass rate of every training prompt, and nothing is trained."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.prompts.pass_rates import Header, PassRate, PassRateFile, identity_of
from megatron_rl.records.run_records import RunRecords
from megatron_rl.rollouts.evaluation import Evaluation, accuracy_of
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.run.modes.evaluate import send_first
from megatron_rl.training.dispatcher import Dispatcher

_AT_A_TIME = 256  # prompts; what an interrupted profile loses at most
_LABELS = 20  # that are told of


@dataclass(frozen=True)
class PassRateProfile:
    """Rank 0 of mode=profile.

    weights: sent to the engines first, None where they hold what answers.
    """

    evaluation: Evaluation
    file: PassRateFile
    weights: WeightSync | None
    dispatcher: Dispatcher
    queue: RolloutQueue
    records: RunRecords

    def lead(self) -> None:
        """Ask every prompt that has no rate yet, write the rates and tell of them; then every rank
        ends.
        """
        values: dict[str, float] = {}
        prompts = self.evaluation.held_out
        try:
            values |= send_first(self.weights, self.dispatcher, self.queue)
            self._ask([prompt for prompt in prompts if prompt.id not in self.file.done])
            self.file.finish()
            rates = [self.file.done[prompt.id] for prompt in prompts]
            values |= metrics(rates)
        finally:
            self.records.metrics.write(0, values)
        self.dispatcher.finish()
        self.queue.stop()
        for line in table(prompts, rates):
            self.records.progress.log(line)

    def _ask(self, prompts: Sequence[Prompt]) -> None:
        """Raises `LostEvaluation` when more than eval.max_rejected_share of the responses to some
        of them are lost.
        """
        settings, say = self.evaluation.settings, self.records.progress.log
        before = len(self.file.done)
        if before:
            say(f"{before} of {before + len(prompts)} prompts have rates from an earlier attempt")
        for first in range(0, len(prompts), _AT_A_TIME):
            some = prompts[first : first + _AT_A_TIME]
            with self.records.progress.task(
                f"asking prompts {first + 1} to {first + len(some)} of {len(prompts)}"
            ):
                groups = replace(self.evaluation, held_out=some).draw(f"profile-{before + first}")
            found = accuracy_of(
                groups, settings.samples_per_prompt, max_rejected_share=settings.max_rejected_share
            )
            self.file.add([rate_of(group) for group in groups])
            say(f"{first + len(some)} of {len(prompts)} prompts: {found}")


def open_rates(c: Configuration) -> PassRateFile:
    """The file that mode=profile writes. Raises `PromptDataError`."""
    assert c.data.pass_rates is not None, "the rules of the configuration ask for it"
    header = Header(
        data=identity_of(c.data),
        model=c.model.path if c.run.resume == "never" else c.run.resume,
        samples=c.eval.samples_per_prompt,
        temperature=c.rollout.temperature if c.eval.temperature is None else c.eval.temperature,
        max_new_tokens=c.rollout.max_new_tokens,
        reward=c.reward.name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return PassRateFile(Path(c.data.pass_rates), header)


def rate_of(group: Group) -> PassRate:
    """A response passes when its correctness is 1; those without a verdict, and lost ones, tell
    nothing.
    """
    told = [r.verdict.correctness for r in group.rollouts if r.verdict.correctness is not None]
    return PassRate(
        id=group.prompt.id, right=sum(correctness == 1.0 for correctness in told), samples=len(told)
    )


def metrics(rates: Sequence[PassRate]) -> dict[str, float]:
    """Mean rate, and the shares of prompts whose responses were all wrong, all right, or of both
    kinds.
    """
    told = [rate for rate in rates if rate.samples]
    count = max(len(told), 1)
    wrong, right = (
        sum(rate.right == bound for rate, bound in zip(told, bounds, strict=True)) / count
        for bounds in ([0] * len(told), [rate.samples for rate in told])
    )
    return {
        "profile/prompts": float(len(rates)),
        "profile/unknown": float(len(rates) - len(told)),
        "profile/pass_rate": sum(rate.right / rate.samples for rate in told) / count,
        "profile/all_wrong": wrong,
        "profile/all_right": right,
        "profile/mixed": 1.0 - wrong - right if told else 0.0,
    }


def table(prompts: Sequence[Prompt], rates: Sequence[PassRate]) -> Iterator[str]:
    """A line for all prompts and for each of the commonest labels."""
    by_label: dict[str, list[PassRate]] = defaultdict(list)
    for prompt, rate in zip(prompts, rates, strict=True):
        by_label[prompt.difficulty or "(no label)"].append(rate)
    commonest = sorted(by_label, key=lambda label: -len(by_label[label]))[:_LABELS]
    width = max(map(len, ("difficulty", *commonest)))
    yield f"{'difficulty':{width}}  prompts  pass rate  all wrong  mixed  all right"
    for label in ("all", *sorted(commonest)):
        of = metrics(rates if label == "all" else by_label[label])
        shares = f"{of['profile/all_wrong']:9.1%}  {of['profile/mixed']:5.1%}  {of['profile/all_right']:9.1%}"
        yield f"{label:{width}}  {of['profile/prompts']:7.0f}  {of['profile/pass_rate']:9.3f}  {shares}"
