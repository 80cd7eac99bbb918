"""Samples of a step on rank 0: what each response trained, and faults that must not end a run."""

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ParallelSettings, SampleSettings, TrainSettings
from megatron_rl.contracts.commands import GatherSamples, Train
from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.rollout import Role, Rollout, Segment
from megatron_rl.contracts.step_plan import ExtraRollout, StepPlan
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.credit.group_kinds import GroupKind
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.records.samples import writer
from megatron_rl.records.samples.parts import SamplePart, ValuePart
from megatron_rl.records.samples.reader import read_samples
from megatron_rl.records.samples.sample import Sample, SampleKind, SampleTraining
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.run.features.samples import keeper as keeper_module
from megatron_rl.run.features.samples.assembly import SampleContext, SampleTexts, assemble
from megatron_rl.run.features.samples.keeper import SampleKeeper
from megatron_rl.run.features.samples.selection import Choice
from megatron_rl.run.loop.trained_step import TrainedStep
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.samples.gathering import encode_tokens
from megatron_rl.training.worker import TrainOutcome
from tests.support.batches import make_batch
from tests.support.judged_batches import GROUP, judged_groups
from tests.support.policies import TWO_DIGIT_ADDITION

_VALUE_SIZES = {"old_logprobs": 4, "entropies": 4, "advantages": 4, "ratios": 4, "clips": 1}
SHAPE = read_shape(TWO_DIGIT_ADDITION)
TOKENIZER = Tokenizer.from_directory(TWO_DIGIT_ADDITION)
# Groups 0, 1 and 3 are mixed. Group 4 is all incorrect and stopped, group 5 is surplus.
ROLLOUTS = make_batch(SHAPE, 6 * GROUP)[1]
GROUPS = judged_groups(ROLLOUTS)
BATCH = RolloutBatch(
    groups=tuple(GROUPS[:4]),
    stopped_groups=(GROUPS[4],),
    surplus_groups=(GROUPS[5],),
    generated_tokens=0,
)


class Ranks:
    """Stands in for the ranks: each token's values are its position among the trained tokens.

    lost_id: the id of a rollout that no node can read.
    """

    def __init__(self, lost_id: str = "") -> None:
        self.commands: list[GatherSamples] = []
        self._rollouts = {rollout.rollout_id: rollout for rollout in ROLLOUTS}
        self._lost_id = lost_id

    def run(self, command: GatherSamples) -> list[SamplePart]:
        self.commands.append(command)
        parts = []
        for index, source in enumerate(command.sources):
            rollout = self._rollouts[source.rollout.rollout_id]
            if rollout.rollout_id == self._lost_id:
                parts.append(SamplePart(index=index, problem=f"{rollout.rollout_id} is gone"))
            else:
                parts.append(SamplePart(index=index, tokens=encode_tokens(rollout)))
            if source.plan_index is not None:
                parts.append(SamplePart(index=index, values=values_of(rollout)))
        return parts


def values_of(rollout: Rollout) -> ValuePart:
    count = sum(len(segment.tokens) for segment in rollout.segments if segment.trainable)
    places = np.arange(count, dtype=np.float32)
    return ValuePart(
        old_logprobs=(-places).tobytes(),
        entropies=places.tobytes(),
        advantages=(places + 0.5).tobytes(),
        ratios=(places + 1).tobytes(),
        clips=(np.arange(count) % 3 - 1).astype(np.int8).tobytes(),
    )


def plan_of(credit: BatchCredit) -> StepPlan:
    planner = StepPlanner(TrainSettings(total_steps=1), ParallelSettings(), dp_size=1, seed=0)
    extra = credit.extra_rollouts
    return planner.plan(7, credit.rollouts, credit.advantages, extra, weights=credit.weights)


CREDIT = Credit(GrpoSettings()).assign(BATCH.groups, BATCH.stopped_groups)
PLAN = plan_of(CREDIT)


def make_keeper(
    path: Path, ranks: Ranks, log: Sequence[str] = (), *, max_groups: int = 8, **settings: Any
) -> SampleKeeper:
    stand_in: Any = ranks
    append: Any = getattr(log, "append", print)
    progress: Any = SimpleNamespace(log=append, task=lambda name: contextlib.nullcontext())
    return SampleKeeper(
        stand_in,
        SampleSettings(**settings),
        seed=0,
        directory=path,
        run=stand_in.run,
        texts=SampleTexts(TOKENIZER),
        progress=progress,
        max_groups=max_groups,
    )


def keep(path: Path, ranks: Ranks | None = None, **options: Any) -> dict[str, Sample]:
    keeper = make_keeper(path, ranks or Ranks(), **options)
    keeper.keep(BATCH, CREDIT, PLAN, {SampleKind.MOST_CLIPPED: 3})
    return {sample.rollout_id: sample for sample in read_samples(path)}


def test_a_step_that_keeps_samples_says_so_in_its_record(tmp_path: Path) -> None:
    outcome = TrainOutcome(True, 1, MetricSums(), {}, extremes={SampleKind.MOST_CLIPPED: 3})
    trained_step = TrainedStep(BATCH, CREDIT, PLAN, outcome)
    for every, is_due in ((7, True), (5, False)):
        values: dict[str, float] = {}
        keeper = make_keeper(tmp_path, Ranks(), every=every)
        assert keeper.prepare(Train(PLAN)).keep_values is is_due
        keeper.after_train(trained_step, values)
        assert ({"samples/kept", "time/samples"} <= values.keys()) is is_due


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return keep(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("every", "steps"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 6]), (10, [1])]
)
def test_the_first_step_and_every_nth_are_due(tmp_path: Path, every: int, steps: list[int]) -> None:
    keeper = make_keeper(tmp_path, Ranks(), every=every)
    assert [step for step in range(1, 7) if keeper.is_due(step)] == steps


def test_all_responses_of_kept_groups_have_their_verdict(samples: dict[str, Sample]) -> None:
    refs = {ref.rollout_id: ref for group in GROUPS for ref in group.rollouts}
    assert samples.keys() == refs.keys()
    assert all(samples[name].verdict == ref.verdict for name, ref in refs.items())
    kinds = [samples[f"t{GROUP * index}"].training.group_kind for index in range(6)]
    assert kinds == ["mixed", "mixed", "all_correct", "mixed", "stopped", "surplus"]
    assert [samples[f"t{GROUP * index}"].training.weight for index in (1, 4)] == [1.5, 0.75]
    assert {sample.step for sample in samples.values()} == {7}


def test_advantages_are_those_of_the_plan(samples: dict[str, Sample]) -> None:
    planned_advantages = dict(
        zip((ref.rollout_id for ref in PLAN.rollouts), PLAN.advantages, strict=True)
    )
    assert len(planned_advantages) == 3 * GROUP - 1, "one response has no verdict"
    for name, sample in samples.items():
        assert sample.training.is_trained == (name in planned_advantages)
        assert sample.training.advantage == planned_advantages.get(name)


def test_values_stand_at_trained_tokens_after_tool_turns_too(samples: dict[str, Sample]) -> None:
    """Rollout 0 has a response of 4 tokens, a tool output of 3 and a response of 6."""
    sample = samples["t0"]
    assert [segment.role for segment in sample.segments] == [
        Role.RESPONSE,
        Role.TOOL,
        Role.RESPONSE,
    ]
    nan = [np.nan] * 3
    tokens = sample.tokens
    np.testing.assert_array_equal(tokens.entropies, [0, 1, 2, 3, *nan, 4, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(tokens.ratios, tokens.entropies + 1)
    np.testing.assert_array_equal(tokens.logprobs, -tokens.entropies)
    assert tokens.clips is not None
    assert tokens.clips.tolist() == [-1, 0, 1, -1, 0, 0, 0, 0, 1, -1, 0, 1, -1]
    assert np.isnan(tokens.rollout_logprobs[4:7]).all() and tokens.mean_mismatch is not None


def test_texts_are_those_of_the_tokens(samples: dict[str, Sample]) -> None:
    sample = samples["t0"]
    segments = ROLLOUTS[0].segments
    assert sample.question.prompt == TOKENIZER.decode(segments[0].tokens.tolist())
    assert [s.text for s in sample.segments] == [
        TOKENIZER.decode(segment.tokens.tolist()) for segment in segments[1:]
    ]
    assert len(sample.tokens.texts) == len(sample.tokens) == 13
    assert "".join(sample.tokens.texts[4:7]).startswith(sample.segments[1].text)


def test_responses_that_did_not_train_have_no_values_of_the_trainer(
    samples: dict[str, Sample],
) -> None:
    sample = samples[f"t{4 * GROUP}"]
    assert not sample.training.is_trained and sample.tokens.clips is None
    assert np.isnan(sample.tokens.logprobs).all() and np.isnan(sample.tokens.ratios).all()
    assert sample.tokens.mean_logprob is not None


def test_the_extremes_of_the_ranks_are_marked(samples: dict[str, Sample]) -> None:
    names = [name for name, s in samples.items() if SampleKind.MOST_CLIPPED in s.kinds]
    assert names == [PLAN.rollouts[3].rollout_id]


def test_values_are_gathered_for_kept_responses_alone(tmp_path: Path) -> None:
    ranks = Ranks()
    names = keep(tmp_path, ranks, max_groups=2).keys()
    (command,) = ranks.commands
    assert [source.rollout.rollout_id for source in command.sources] != []
    assert {source.rollout.rollout_id for source in command.sources} == names
    assert len(names) == 2 * GROUP


def test_a_step_that_trains_nothing_keeps_samples(tmp_path: Path) -> None:
    group: Group = msgspec.structs.replace(GROUPS[4], weight=1.0)
    batch = RolloutBatch(groups=(group,), generated_tokens=0)
    credit = Credit(GrpoSettings()).assign(batch.groups)
    metrics = make_keeper(tmp_path, Ranks()).keep(batch, credit, plan_of(credit), {})
    assert metrics["samples/kept"] == GROUP
    assert all(not sample.training.is_trained for sample in read_samples(tmp_path))


@pytest.mark.parametrize("fault", ["full", "unwritable", "bug"])
def test_a_file_that_cannot_be_written_costs_a_warning_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def raise_fault(file: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    if fault == "full":
        monkeypatch.setattr(writer, "write_synced", raise_fault)
    elif fault == "bug":
        monkeypatch.setattr(writer, "to_table", lambda rows: 1 / 0)
    else:
        (tmp_path / "samples").write_text("a file")
    log: list[str] = []
    metrics = make_keeper(tmp_path, Ranks(), log).keep(BATCH, CREDIT, PLAN, {})
    expected_metrics = {"samples/kept": 0.0, "samples/left_out": 6.0 * GROUP, "samples/failed": 1.0}
    assert metrics == expected_metrics
    (line,) = log
    reasons = {"full": "the disk is full", "unwritable": "FileExistsError", "bug": "ZeroDivision"}
    assert line.startswith("warning: step 7 keeps no samples: ") and reasons[fault] in line


@pytest.mark.parametrize("function", ["choose_samples", "_contexts", "_command"])
def test_an_error_in_the_choice_is_counted_printed_once_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    log: list[str] = []
    keeper = make_keeper(tmp_path, Ranks(), log)
    with monkeypatch.context() as faults:
        faults.setattr(keeper_module, function, lambda *arguments, **options: 1 / 0)
        for _ in range(3):
            metrics = keeper.keep(BATCH, CREDIT, PLAN, {})
            assert metrics == {"samples/kept": 0, "samples/left_out": 0, "samples/failed": 1}
    (line,) = log
    assert line.startswith("warning: step 7 keeps no samples: ZeroDivisionError: division by zero")
    assert keeper.keep(BATCH, CREDIT, PLAN, {})["samples/kept"] == 6 * GROUP, "it goes on"


def test_another_error_is_printed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    keeper = make_keeper(tmp_path, Ranks(), log)
    for error in (ValueError("a"), ValueError("b"), KeyError("c"), OSError(28, "full")):

        def fail(*arguments: Any, error: Exception = error, **options: Any) -> None:
            raise error

        monkeypatch.setattr(keeper_module, "choose_samples", fail)
        keeper.keep(BATCH, CREDIT, PLAN, {})
    assert [line.split(": ")[2] for line in log] == ["ValueError", "KeyError", "OSError"]


def test_an_error_of_the_ranks_is_no_error_of_samples(tmp_path: Path) -> None:
    """After a failed collective the ranks wait for different things, so the run has to end."""

    class Broken(Ranks):
        def run(self, command: GatherSamples) -> list[SamplePart]:
            raise ConnectionError("rank 3 is gone")

    with pytest.raises(ConnectionError):
        make_keeper(tmp_path, Broken()).keep(BATCH, CREDIT, PLAN, {})


def test_lost_samples_are_named_once(tmp_path: Path) -> None:
    log: list[str] = []
    keeper = make_keeper(tmp_path, Ranks(lost_id="t5"), log)
    for _ in range(3):
        assert keeper.keep(BATCH, CREDIT, PLAN, {})["samples/left_out"] == 1
    assert len(log) == 1


def test_a_rollout_that_is_gone_is_named_and_counted(tmp_path: Path) -> None:
    log: list[str] = []
    metrics = make_keeper(tmp_path, Ranks(lost_id="t5"), log).keep(BATCH, CREDIT, PLAN, {})
    (line,) = log
    assert line.startswith("warning: step 7 lacks a part of its samples: t5 is gone. The run cont")
    assert (metrics["samples/kept"], metrics["samples/left_out"]) == (6 * GROUP - 1, 1)


def test_extra_rollouts_have_their_advantage(tmp_path: Path) -> None:
    """Tied groups have advantages. Rollouts that train by entropies have none for the response."""
    first, second, *_ = GROUPS[4].rollouts
    extra = (ExtraRollout(first, 0.05), ExtraRollout(second, 0.0, entropy_advantage=-0.1))
    batch = RolloutBatch(groups=(GROUPS[4],), generated_tokens=0)
    credit = BatchCredit(extra_rollouts=extra, kinds=(GroupKind.TIED_INCORRECT,))
    make_keeper(tmp_path, Ranks()).keep(batch, credit, plan_of(credit), {})
    advantages = {sample.rollout_id: sample.training.advantage for sample in read_samples(tmp_path)}
    others = {ref.rollout_id: None for ref in GROUPS[4].rollouts[1:]}
    assert advantages == {first.rollout_id: 0.05} | others


def test_the_first_token_never_trains() -> None:
    """A rollout without a prompt has one trained token less, because nothing precedes it."""
    segment = Segment(np.arange(3, dtype=np.int32), Role.RESPONSE, True, None, (0, 2), 0)
    rollout = replace(ROLLOUTS[0], segments=(segment,))
    values = values_of(ROLLOUTS[0])
    two = {name: getattr(values, name)[: 2 * size] for name, size in _VALUE_SIZES.items()}
    choice = Choice(group=0, rollout=GROUPS[0].rollouts[0])
    training = SampleTraining(group_kind="mixed", is_trained=True, advantage=0.5, weight=1.0)
    context = SampleContext(7, choice, GROUPS[0].prompt, training)
    sample = assemble(context, encode_tokens(rollout), ValuePart(**two), SampleTexts(TOKENIZER))
    np.testing.assert_array_equal(sample.tokens.entropies, [np.nan, 0, 1])
    assert sample.question.prompt == "" and len(sample.tokens) == 3


def test_a_reward_without_correctness_is_kept(tmp_path: Path) -> None:
    verdict = Verdict(reward=0.25, correctness=None)
    refs = tuple(msgspec.structs.replace(ref, verdict=verdict) for ref in GROUPS[0].rollouts)
    batch = RolloutBatch(
        groups=(msgspec.structs.replace(GROUPS[0], rollouts=refs),), generated_tokens=0
    )
    credit = Credit(GrpoSettings()).assign(batch.groups)
    make_keeper(tmp_path, Ranks()).keep(batch, credit, plan_of(credit), {})
    assert [sample.verdict for sample in read_samples(tmp_path)] == [verdict] * GROUP
