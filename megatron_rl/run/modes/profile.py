"""mode=profile: rank 0 estimates the pass rate of every training prompt; nothing is trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.prompts.pass_rates import PassRate, PassRateFile
from megatron_rl.records.run_records import RunRecords
from megatron_rl.rollouts.evaluation.evaluation import Evaluation, accuracy_of
from megatron_rl.run.data import open_rates
from megatron_rl.run.modes.evaluate import open_evaluation, send_first, weights_to_send
from megatron_rl.run.modes.mode import Lead, LoopParts, Mode
from megatron_rl.run.setup import RunSetup
from megatron_rl.training.dispatcher import Dispatcher

_MAX_LABELS = 20  # lines of the table besides the first


def open_profile(setup: RunSetup) -> Mode:
    """Open the file of pass rates, with its rates so far. Raises `PromptDataError`."""
    file = open_rates(setup.configuration)

    def profile(parts: LoopParts) -> Lead:
        assert parts.connections is not None
        return PassRateProfile(
            evaluation=open_evaluation(parts, setup.run_data.sets["train"]),
            file=file,
            weights=weights_to_send(parts),
            dispatcher=parts.dispatcher,
            connections=parts.connections,
            records=parts.records,
        ).lead

    return profile


@dataclass(frozen=True)
class PassRateProfile:
    """The loop of rank 0.

    weights: sent to the engines first; None where they hold them already. chunk_size: prompts whose
    responses an interrupted profile may lose.
    """

    evaluation: Evaluation
    file: PassRateFile
    weights: WeightSync | None
    dispatcher: Dispatcher
    connections: EngineConnections
    records: RunRecords
    chunk_size: int = 256

    def lead(self) -> None:
        """Sample every prompt that has no rate, write the rates and log a table; end every rank."""
        values: dict[str, float] = {}
        prompts = self.evaluation.prompts
        try:
            with self.records.progress.task("sending the weights to the engines"):
                values |= send_first(self.weights, self.dispatcher, self.connections)
            self._sample([prompt for prompt in prompts if prompt.id not in self.file.rates])
            self.file.finish()
            rates = [self.file.rates[prompt.id] for prompt in prompts]
            values |= metrics(rates)
        finally:
            self.records.metrics.write(0, values)
        self.dispatcher.finish()
        self.connections.stop()
        for line in table(prompts, rates):
            self.records.progress.log(line)

    def _sample(self, prompts: Sequence[Prompt]) -> None:
        """Raises `Failure` when more than `MAX_REJECTED_SHARE` of a chunk is lost."""
        progress = self.records.progress
        num_known = len(self.file.rates)
        if num_known:
            total = num_known + len(prompts)
            progress.log(f"{num_known} of {total} prompts have rates from an earlier attempt")
        for first in range(0, len(prompts), self.chunk_size):
            chunk = prompts[first : first + self.chunk_size]
            last = first + len(chunk)
            evaluation = replace(self.evaluation, prompts=chunk)
            groups = evaluation.sample(f"profile-{num_known + first}")
            accuracy = accuracy_of(groups, self.evaluation.settings.samples_per_prompt)
            self.file.add([rate_of(group) for group in groups])
            progress.log(f"{last} of {len(prompts)} prompts: {accuracy}")


def rate_of(group: Group) -> PassRate:
    """Return the pass rate of one prompt, and the mean tokens of its responses.

    A response passes when its correctness is 1. Lost responses, and those without a verdict, do
    not count.
    """
    correctness = [
        rollout.verdict.correctness
        for rollout in group.rollouts
        if rollout.verdict.correctness is not None
    ]
    passes = sum(value == 1.0 for value in correctness)
    lengths = [rollout.num_generated for rollout in group.rollouts]
    return PassRate(
        id=group.prompt.id,
        correct=passes,
        samples=len(correctness),
        mean_tokens=fmean(lengths) if lengths else None,
    )


def metrics(rates: Sequence[PassRate]) -> dict[str, float]:
    """Return the mean rate and the shares of all-incorrect, all-correct and mixed prompts."""
    sampled_rates = [rate for rate in rates if rate.samples]
    count = max(len(sampled_rates), 1)
    incorrect = sum(rate.correct == 0 for rate in sampled_rates) / count
    correct = sum(rate.correct == rate.samples for rate in sampled_rates) / count
    return {
        "profile/prompts": float(len(rates)),
        "profile/unknown": float(len(rates) - len(sampled_rates)),
        "profile/pass_rate": sum(rate.correct / rate.samples for rate in sampled_rates) / count,
        "profile/all_incorrect": incorrect,
        "profile/all_correct": correct,
        "profile/mixed": 1.0 - incorrect - correct if sampled_rates else 0.0,
    }


def table(prompts: Sequence[Prompt], rates: Sequence[PassRate]) -> Iterator[str]:
    """Yield a line for all prompts and one for each of the most frequent labels."""
    by_label: dict[str, list[PassRate]] = defaultdict(list)
    for prompt, rate in zip(prompts, rates, strict=True):
        by_label[prompt.difficulty or "(no label)"].append(rate)
    labels = sorted(by_label, key=lambda label: -len(by_label[label]))[:_MAX_LABELS]
    width = max(map(len, ("difficulty", *labels)))
    yield f"{'difficulty':{width}}  prompts  pass rate  all incorrect  mixed  all correct"
    yield _line("all", width, metrics(rates))
    for label in sorted(labels):
        yield _line(label, width, metrics(by_label[label]))


def _line(label: str, width: int, values: dict[str, float]) -> str:
    return (
        f"{label:{width}}  {values['profile/prompts']:7.0f}  {values['profile/pass_rate']:9.3f}"
        f"  {values['profile/all_incorrect']:13.1%}  {values['profile/mixed']:5.1%}"
        f"  {values['profile/all_correct']:11.1%}"
    )
