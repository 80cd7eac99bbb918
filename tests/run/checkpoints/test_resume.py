"""Finding the newest complete checkpoint, and comparing its settings with the run's."""

import datetime
import errno
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import Configuration, EnvironmentSettings, SourceSettings
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.mcore import checkpoint, collectives
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.records.durable_files import write_synced
from megatron_rl.records.past_run import read_metrics
from megatron_rl.records.run_directory import RunDirectory, is_run_directory, run_directory_path
from megatron_rl.records.run_lock import claim_run, mark_run_alive
from megatron_rl.rewards import Scorer
from megatron_rl.run import open_run
from megatron_rl.run.checkpoints import resume
from megatron_rl.run.checkpoints.manifest import Manifest, hash_file, write_manifest
from megatron_rl.run.checkpoints.resume import (
    ResumePoint,
    explained_load_errors,
    find_resume_point,
    flat_configuration,
    newest_complete,
    open_run_directory,
)
from megatron_rl.run.checkpoints.state_file import read_state
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.prompts import build_prompts
from tests.support.checkpoints import flip_bit, make_state, save_checkpoint
from tests.support.configurations import configuration_of
from tests.support.openings import open_up_to_engines
from tests.support.past_runs import make_run_directory
from tests.support.thread_ranks import broadcast_bytes, gather_bytes, run_on_ranks

JOB: Any = SimpleNamespace(rank=0, world_size=1, control_group=None)
SMALL = "data.num_train=100"


def make_configuration(root: Path, *overrides: str) -> Configuration:
    return configuration_of(["experiment=smoke", f"run.root={root}", "run.name=job", *overrides])


def find_for(c: Configuration) -> ResumePoint:
    path = run_directory_path(c.run, datetime.datetime(2025, 1, 2))
    return find_resume_point(c.run.resume, RunDirectory(path), JOB)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Three checkpoints of a run that was killed."""
    directory = make_run_directory(make_configuration(tmp_path))
    store = CheckpointStore(directory.checkpoints)
    settings = flat_configuration(make_configuration(tmp_path, "run.resume=auto"))
    for step in (5, 10, 15):
        save_checkpoint(store, step, settings)
    return store


@pytest.mark.parametrize("overrides", [(), ("run.resume=auto",)])
def test_a_new_run_has_no_resume_point(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    c = make_configuration(tmp_path, *overrides)
    assert find_for(c) == ResumePoint()
    directory = RunDirectory(tmp_path / "job")
    open_run_directory(directory, c, ResumePoint())
    assert is_run_directory(directory.path)


@pytest.mark.slow
def test_the_newest_complete_checkpoint_is_found_and_damaged_ones_are_reported(
    tmp_path: Path, store: CheckpointStore
) -> None:
    flip_bit(store.path(15) / "tensors")
    (store.path(10) / "tensors").unlink()
    c = make_configuration(tmp_path, "run.resume=auto")
    resume_point = find_for(c)
    assert resume_point.checkpoint == store.path(5)
    assert resume_point.state is not None
    assert resume_point.state.step == 5
    newest, middle = resume_point.damaged_checkpoints
    assert "iter_0000015: tensors has changed" in newest
    assert "iter_0000010: tensors is missing" in middle
    open_run_directory(RunDirectory(tmp_path / "job"), c, resume_point)
    assert [path.name for path in store.checkpoints()] == ["iter_0000005"]
    assert (store.folder / "iter_0000015.damaged-1/tensors").exists()


@pytest.mark.slow
def test_damage_that_one_rank_reads_is_known_to_all(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank reads a share of the files."""
    monkeypatch.setattr(collectives, "gather_bytes", gather_bytes)
    monkeypatch.setattr(resume, "broadcast_bytes", broadcast_bytes)
    changes = {
        "tensors": (b"tensors", b"Tensors"),
        "state.json": (b'"digest": "d"', b'"digest": "e"'),
    }
    for name, (old, new) in changes.items():
        file = store.path(15) / name
        data = file.read_bytes()
        assert old in data
        file.write_bytes(data.replace(old, new))

        def find(group: Any) -> Any:
            job: Any = SimpleNamespace(rank=group[1], world_size=2, control_group=group)
            return newest_complete(store.checkpoints() if job.rank == 0 else [], job)

        results = run_on_ranks(2, find)
        assert results[0] == results[1]
        newest, (problem,) = results[0]
        assert newest == store.path(10)
        assert f"iter_0000015: {name} has changed" in problem
        file.write_bytes(data)


@pytest.mark.slow
def test_a_checkpoint_whose_state_cannot_be_read_is_skipped(store: CheckpointStore) -> None:
    """Its files are as they were saved, but by another version."""
    states = [
        msgspec.json.encode(make_state(20)) + b"}",
        msgspec.json.encode(msgspec.structs.replace(make_state(20), format=0)),
        msgspec.json.encode(msgspec.structs.replace(make_state(20), format=3)),
        b"\xff\xfe",
    ]
    for step, state in enumerate(states, 20):
        staging = store.create_staging(step)
        write_synced(staging / "state.json", state)
        files = {"state.json": hash_file(staging / "state.json")}
        write_manifest(staging, Manifest(step=step, files=files))
        store.commit(step)
    newest, problems = newest_complete(store.checkpoints(), JOB)
    assert newest == store.path(15)
    reasons = ["cannot be read", "has format 3", "has format 0", "cannot be read"]
    for problem, reason in zip(problems, reasons, strict=True):
        assert reason in problem


@pytest.mark.parametrize(
    "missing", ["weights_synced", "selection", "step", "version", "optimizer_steps", "world_size"]
)
def test_a_state_that_lacks_a_field_is_refused(tmp_path: Path, missing: str) -> None:
    """A default would resume the run elsewhere."""
    state = msgspec.to_builtins(make_state(5))
    del (state if missing in state else state["position"])[missing]
    (tmp_path / "state.json").write_bytes(msgspec.json.encode(state))
    with pytest.raises(ValueError, match=f"missing required field `{missing}`"):
        read_state(tmp_path)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_loads_its_own_random_numbers_unless_the_number_of_ranks_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    loaded_state: dict[str, Any] = {}
    monkeypatch.setattr(
        checkpoint,
        "load_tensors",
        lambda *_, optimizer_steps, group: loaded_state.update(steps=optimizer_steps),
    )
    monkeypatch.setattr(
        checkpoint, "load_random_state", lambda file: loaded_state.update(file=file)
    )
    state = msgspec.structs.replace(make_state(5), optimizer_steps=7, world_size=2)
    worker: Any = SimpleNamespace(
        layout=SimpleNamespace(rank=world_size - 1, world_size=world_size, control_group=None),
        policy=SimpleNamespace(models=[]),
        optimizer=None,
    )
    warning = ResumePoint(tmp_path, state).load(worker)
    assert loaded_state.pop("steps") == 7
    if world_size == 2:
        assert loaded_state == {"file": checkpoint.random_state_file(tmp_path, 1)} and warning == ""
    else:
        assert loaded_state == {}
        assert f"for 2 ranks: they start anew on {world_size} ranks" in warning


def test_a_checkpoint_that_cannot_be_read_is_unusable(tmp_path: Path) -> None:
    with (
        pytest.raises(Failure, match=r"cannot be loaded: .*Stale file handle"),
        explained_load_errors(tmp_path),
    ):
        raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.slow
def test_the_records_of_a_resumed_run_end_at_its_checkpoint(
    tmp_path: Path, store: CheckpointStore
) -> None:
    directory = RunDirectory(tmp_path / "job")
    directory.metrics_file.write_text("".join(f'{{"step": {step}}}\n' for step in range(18)))
    c = make_configuration(tmp_path, "run.resume=auto")
    resume_point = find_for(c)
    open_run_directory(directory, c, resume_point)
    assert [record["step"] for record in read_metrics(directory.path)] == list(range(16))
    assert len(store.checkpoints()) == 3, "the checkpoint that the run resumes from stays"


@pytest.mark.slow
def test_the_resume_point_is_found_after_the_previous_processes_ended(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dying process can still save a checkpoint and remove others."""
    lock = mark_run_alive(store.folder.parent)
    c = make_configuration(tmp_path, "run.resume=auto", SMALL)
    selector = open_selector(build_prompts(c), c.rollout, c.selection, seed=c.seed)

    def die() -> None:
        save_checkpoint(store, 20, flat_configuration(c), selection=selector.state())
        store.prune(1)
        lock.close()

    def fail(path: Path) -> None:
        raise OSError("no locks")

    # A run also marks itself alive later, which would hide that it holds no claim
    monkeypatch.setattr(open_run, "mark_run_alive", fail)
    death = threading.Timer(0.5, die)
    death.start()
    with open_up_to_engines(c) as lines:
        assert f"resuming after step 20, from {store.path(20)}" in lines
        # This process holds the claim now
        assert claim_run(store.folder.parent) is None
    death.join()


def warnings_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("warning: ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "is_warned"), [((), True), (("run.checkpoint_every=2",), False)]
)
def test_resume_auto_without_checkpoints_is_warned_about(
    tmp_path: Path, overrides: tuple[str, ...], is_warned: bool
) -> None:
    c = make_configuration(tmp_path, "run.resume=auto", SMALL, *overrides)
    with open_up_to_engines(c) as lines:
        assert any("warning: run.resume=auto" in line for line in lines) == is_warned


@pytest.mark.slow
@pytest.mark.parametrize(("records", "is_warned"), [("", False), ('{"step": 1}', True)])
def test_records_without_checkpoints_are_warned_about(
    tmp_path: Path, records: str, is_warned: bool
) -> None:
    c = make_configuration(tmp_path, "run.resume=auto", SMALL, "run.checkpoint_every=2")
    make_run_directory(c).metrics_file.write_text(records)
    with open_up_to_engines(c) as lines:
        warnings = warnings_of(lines)
    assert ["starts again from step 0" in warning for warning in warnings] == [True] * is_warned


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "is_warned"), [(1, True), (63, True), (64, False)])
def test_micro_batches_of_one_rollout_are_warned_about(
    tmp_path: Path, tokens: int, is_warned: bool
) -> None:
    c = make_configuration(
        tmp_path,
        SMALL,
        f"train.tokens_per_micro_batch={tokens}",
        "data.max_prompt_tokens=32",
        "rollout.max_new_tokens=32",
    )
    with open_up_to_engines(c) as lines:
        warnings = warnings_of(lines)
    assert [f"tokens_per_micro_batch={tokens}," in warning for warning in warnings] == (
        [True] if is_warned else []
    )


@pytest.mark.slow
def test_a_run_without_any_complete_checkpoint_does_not_start_anew(
    tmp_path: Path, store: CheckpointStore
) -> None:
    for path in store.checkpoints():
        (path / "manifest.json").unlink()
    with pytest.raises(Failure, match=r"iter_0000015: manifest\.json cannot be read.*iter_0000005"):
        find_for(make_configuration(tmp_path, "run.resume=auto"))


@pytest.mark.slow
def test_another_run_starts_from_a_run_or_from_one_of_its_checkpoints(
    tmp_path: Path, store: CheckpointStore
) -> None:
    for path, step in ((tmp_path / "job", 15), (store.folder, 15), (store.path(10), 10)):
        c = make_configuration(tmp_path, f"run.resume={path}", "run.name=other")
        assert find_for(c).checkpoint == store.path(step)
    open_run_directory(RunDirectory(tmp_path / "other"), c, find_for(c))
    assert is_run_directory(tmp_path / "other")
    assert len(store.checkpoints()) == 3


@pytest.mark.slow
def test_a_run_that_starts_from_another_does_not_write_into_an_existing_directory(
    tmp_path: Path, store: CheckpointStore
) -> None:
    c = make_configuration(tmp_path, f"run.resume={store.path(10)}", "run.name=other")
    with pytest.raises(Failure, match=r"run\.name='job'"):
        open_run_directory(RunDirectory(tmp_path / "job"), c, find_for(c))


def test_a_directory_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    c = make_configuration(tmp_path, f"run.resume={tmp_path}/empty", "run.name=third")
    with pytest.raises(Failure, match="empty"):
        find_for(c)


@pytest.mark.slow
def test_changed_settings_are_listed_or_refused(tmp_path: Path) -> None:
    settings = flat_configuration(make_configuration(tmp_path, "optimizer.lr=0.1", "parallel.ep=1"))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    c = make_configuration(
        tmp_path, "optimizer.lr=0.2", "run.resume=auto", "run.checkpoint_every=3"
    )
    assert resume_point.changed_settings(c) == ["optimizer.lr: 0.1 -> 0.2"]
    c = make_configuration(tmp_path, "optimizer.lr=0.1", "data.seed=7")
    with pytest.raises(Failure, match=r"data\.seed: 0 -> 7"):
        resume_point.changed_settings(c)


@pytest.mark.slow
def test_settings_of_an_older_version_are_compared_under_their_present_keys(
    tmp_path: Path,
) -> None:
    options = {"task": "chain_sum", "min_terms": 3}
    sources = {
        "a": SourceSettings(source="reasoning_gym", weight=1.0, options=options),
        "b": SourceSettings(source="two_digit_addition", weight=1.0),
    }
    c = make_configuration(tmp_path)
    c = replace(
        c,
        data=replace(c.data, source="mixture", sources=sources),
        environment=EnvironmentSettings(name="demonstration", options={"tool": "calculator"}),
    )
    settings = flat_configuration(c)
    for key in ("data.sources.a.options.task", "data.sources.a.options.min_terms"):
        del settings[key]
    del settings["environment.options.tool"]
    older_settings = settings | {
        "environment.tool": "calculator",
        "environment.options": {},
        "data.sources.a.task": "chain_sum",
        "data.sources.a.task_config.min_terms": 3,
        "data.sources.a.options": {},
        "data.sources.b.task": None,
        "data.sources.b.task_config": {},
        "credit.tied_scale": 0.1,
    }
    resume_point = ResumePoint(tmp_path, make_state(5, older_settings))
    assert resume_point.changed_settings(c) == []
    changed_settings = older_settings | {"data.sources.a.task": "gcd"}
    with pytest.raises(Failure, match=r"data\.sources\.a\.options\.task: 'gcd' -> 'chain_sum'"):
        ResumePoint(tmp_path, make_state(5, changed_settings)).changed_settings(c)


@pytest.mark.slow
def test_keys_that_only_an_older_version_had_are_named_and_refuse_nothing(tmp_path: Path) -> None:
    c = make_configuration(tmp_path, "run.resume=auto")
    old_keys = {
        "engine.fake_quant": "off",
        "engine.retries": 2,
        "guard.window": 64,
        "selection.expert.min_filled": 0.9,
    }
    state = make_state(5, flat_configuration(c) | old_keys)
    resume_point = ResumePoint(tmp_path, state)
    assert resume_point.changed_settings(c) == []
    assert resume_point.missing_settings(c) == [
        "engine.fake_quant='off'",
        "engine.retries=2",
        "guard.window=64",
        "selection.expert.min_filled=0.9",
    ]
    same_version = ResumePoint(tmp_path, make_state(5, flat_configuration(c)))
    assert same_version.missing_settings(c) == ResumePoint().missing_settings(c) == []


@pytest.mark.slow
@pytest.mark.parametrize("open_steps", [(6,), (6, 7, 8)])
def test_open_steps_resume_with_the_staleness_that_began_them_and_not_with_less(
    tmp_path: Path, open_steps: tuple[int, ...]
) -> None:
    """A stop request also finds the next step itself open, and may find old tokens in it alone."""
    ahead = ("rollout.on_update=resume", "train.total_steps=9")
    first_configuration = make_configuration(tmp_path, *ahead, "rollout.max_staleness=2")
    state = make_state(5, flat_configuration(first_configuration))
    position = msgspec.structs.replace(state.position, open_steps=open_steps)
    resume_point = ResumePoint(tmp_path, msgspec.structs.replace(state, position=position))
    for staleness in (2, 3):
        c = make_configuration(tmp_path, *ahead, f"rollout.max_staleness={staleness}")
        assert len(resume_point.changed_settings(c)) == (staleness != 2)
    words = r"rollout\.max_staleness=1: .* open rollouts of step\(s\) \[6.*Give at least 2"
    with pytest.raises(Failure, match=words):
        resume_point.changed_settings(
            make_configuration(tmp_path, *ahead, "rollout.max_staleness=1")
        )


@pytest.mark.slow
def test_steps_ahead_resume_with_as_much_staleness_as_there_are(tmp_path: Path) -> None:
    ahead = ("rollout.max_staleness=1", "train.total_steps=9")
    c = make_configuration(tmp_path, *ahead)
    state = make_state(5, flat_configuration(c))
    position = msgspec.structs.replace(state.position, steps_ahead=(6,))
    resume_point = ResumePoint(tmp_path, msgspec.structs.replace(state, position=position))
    assert resume_point.changed_settings(c) == []
    with pytest.raises(Failure, match=r"rollouts of 1 step\(s\) .*Give at least 1"):
        resume_point.changed_settings(make_configuration(tmp_path, "train.total_steps=9"))


def make_resume_point(
    root: Path, configuration: Configuration, **steps: tuple[int, ...]
) -> ResumePoint:
    """Return a checkpoint after step 5. steps: what its position holds of later steps."""
    state = make_state(5, flat_configuration(configuration))
    position = msgspec.structs.replace(state.position, **steps)
    return ResumePoint(root, msgspec.structs.replace(state, position=position))


RESUME = "rollout.on_update=resume"
BOUNDS = [
    ({"open_steps": (6, 7)}, ("rollout.max_staleness=2", RESUME), ("rollout.max_staleness=2",), 1),
    (
        {"open_steps": (6,)},
        ("rollout.max_staleness=1", RESUME),
        ("rollout.max_staleness=1",),
        None,
    ),
    # A user-defined environment: the checkpoint holds whole batches, which may be old
    (
        {"steps_ahead": (6,)},
        ("rollout.max_staleness=3", RESUME),
        ("rollout.max_staleness=2", RESUME),
        2,
    ),
    ({"steps_ahead": (6,)}, ("rollout.max_staleness=3",), ("rollout.max_staleness=1",), None),
    (
        {"steps_ahead": (6,)},
        ("rollout.max_staleness=3",),
        ("rollout.max_staleness=1", RESUME),
        None,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "first", "second", "refused_bound"), BOUNDS)
def test_rollouts_of_later_steps_need_the_bound_of_their_age(
    tmp_path: Path,
    steps: dict[str, tuple[int, ...]],
    first: tuple[str, ...],
    second: tuple[str, ...],
    refused_bound: int | None,
) -> None:
    """With `wait`, the age is at most 1 whatever rollout.max_staleness is."""
    steps_of_run = "train.total_steps=9"
    first_configuration = make_configuration(tmp_path, *first, steps_of_run)
    resume_point = make_resume_point(tmp_path, first_configuration, **steps)
    c = make_configuration(tmp_path, *second, steps_of_run)
    if refused_bound is None:
        resume_point.changed_settings(c)
        return
    words = rf"at most {refused_bound} version.*Give at least [23]"
    with pytest.raises(Failure, match=words):
        resume_point.changed_settings(c)


class Weighted(Scorer):
    def __init__(self, weight: float = 1.0, other: float = 1.0) -> None: ...

    async def score(self, prompt, text, finish_reason):  # type: ignore[no-untyped-def]
        raise NotImplementedError


VERDICTS = [
    ("reward.answer=boxed", True),
    (f"reward.name={__name__}:Weighted", True),
    ("environment.name=calculator", True),
    ("reward.timeout_s=3", False),
    ("environment.timeout_s=3", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "is_refused"), VERDICTS)
def test_open_groups_keep_their_scorer_and_environment(
    tmp_path: Path, change: str, is_refused: bool
) -> None:
    """Rollouts of one group would have verdicts of two scorers."""
    ahead = ("rollout.max_staleness=2", RESUME, "train.total_steps=9")
    first = make_configuration(tmp_path, *ahead)
    resume_point = make_resume_point(tmp_path, first, open_steps=(6, 7))
    c = make_configuration(tmp_path, *ahead, change)
    if is_refused:
        key, value = change.split("=")
        words = rf"{key}: .* -> {value!r}: .*train\.total_steps=7"
        with pytest.raises(Failure, match=words):
            resume_point.changed_settings(c)
    else:
        assert len(resume_point.changed_settings(c)) == 1
    closed_point = make_resume_point(tmp_path, first)
    assert len(closed_point.changed_settings(c)) == 1


@pytest.mark.slow
def test_open_groups_keep_the_options_of_their_scorer(tmp_path: Path) -> None:
    ahead = ("rollout.max_staleness=2", RESUME, "train.total_steps=9")
    ahead = (*ahead, "reward=custom", f"reward.name={__name__}:Weighted")
    first = make_configuration(tmp_path, *ahead, "reward.options.weight=2")
    resume_point = make_resume_point(tmp_path, first, open_steps=(6, 7))
    assert resume_point.changed_settings(first) == []
    for options in ("{}", "{weight: 3}", "{weight: 2, other: 2}"):
        c = make_configuration(tmp_path, *ahead, f"reward.options={options}")
        with pytest.raises(Failure, match=r"reward\.options"):
            resume_point.changed_settings(c)


SAMPLED_AHEAD = [
    ({"steps_ahead": (6,)}, "rollout.temperature=0.7", True),
    ({"open_steps": (6, 7)}, "rollout.temperature=0.7", True),
    ({"open_steps": (6, 7)}, "rollout.max_new_tokens=99", True),
    ({"steps_ahead": (6,)}, "rollout.max_new_tokens=99", False),
    ({"steps_ahead": (6,)}, "rollout.train_truncated=False", True),
    ({"open_steps": (6, 7)}, "rollout.train_truncated=False", True),
    ({"steps_ahead": (6,)}, "credit.repetition_ngram=3", False),
    ({"open_steps": (6, 7)}, "credit.repetition_ngram=3", False),
    ({"open_steps": (6, 7)}, "credit.shaping=0.25", False),
    ({}, "rollout.temperature=0.7", False),
    ({}, "rollout.train_truncated=False", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "change", "is_refused"), SAMPLED_AHEAD)
def test_rollouts_that_were_sampled_otherwise_are_refused(
    tmp_path: Path, steps: dict[str, tuple[int, ...]], change: str, is_refused: bool
) -> None:
    """The trainer computes log-probabilities at the present temperature."""
    ahead = (
        "rollout.max_staleness=2",
        RESUME,
        "train.total_steps=9",
    )
    state = make_state(5, flat_configuration(make_configuration(tmp_path, *ahead)))
    position = msgspec.structs.replace(state.position, **steps)
    resume_point = ResumePoint(tmp_path, msgspec.structs.replace(state, position=position))
    c = make_configuration(tmp_path, *ahead, change)
    if not is_refused:
        assert len(resume_point.changed_settings(c)) == 1
        return
    last_step = max(step for group in steps.values() for step in group)
    key, value = change.split("=")
    words = rf"{key}: .* -> {value}: .*train\.total_steps={last_step}, "
    with pytest.raises(Failure, match=words):
        resume_point.changed_settings(c)


PHASES = [
    ("rollout.temperature: 0.5,", "", False),
    ("", "", True),
    ("", ", rollout.temperature: 0.5", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "is_refused"), PHASES)
def test_a_temperature_that_the_first_phase_replaces_may_change(
    tmp_path: Path, first: str, second: str, is_refused: bool
) -> None:
    """Later phases keep the temperature of the first one, or set their own."""
    overrides = (
        "rollout.max_staleness=1",
        "train.total_steps=9",
        f"curriculum=[{{name: first, {first} until: {{steps: 7}}}},{{name: second{second}}}]",
    )
    state = make_state(5, flat_configuration(make_configuration(tmp_path, *overrides)))
    position = msgspec.structs.replace(state.position, steps_ahead=(6,))
    resume_point = ResumePoint(tmp_path, msgspec.structs.replace(state, position=position))
    c = make_configuration(tmp_path, *overrides, "rollout.temperature=0.7")
    if is_refused:
        with pytest.raises(Failure, match=r"rollout\.temperature"):
            resume_point.changed_settings(c)
    else:
        assert len(resume_point.changed_settings(c)) == 1


def mixture_overrides(tmp_path: Path, sources: str) -> tuple[str, ...]:
    (tmp_path / "sums.jsonl").touch()
    return ("data=mixture", f"data.sources={{{sources}}}")


@pytest.mark.slow
def test_another_mixture_is_refused_by_the_key_that_differs(tmp_path: Path) -> None:
    sums = f"sums: {{source: jsonl, train_path: {tmp_path}/sums.jsonl, weight: 1}}"
    more = "more: {source: two_digit_addition, weight: 1}"
    overrides = mixture_overrides(tmp_path, f"{sums}, {more}")
    settings = flat_configuration(make_configuration(tmp_path, *overrides))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    same = overrides[1].replace(f"{tmp_path}/sums", f"{tmp_path}/./sums")
    assert not resume_point.changed_settings(make_configuration(tmp_path, "data=mixture", same))
    for other, words in (
        (
            f"{sums}, {more.replace('weight: 1', 'weight: 2')}",
            r"sources\.more\.weight: 1\.0 -> 2\.0",
        ),
        (sums, r"sources\.more\.weight: 1\.0 -> no such source"),
        (
            f"{sums}, {more}, {more.replace('more', 'new')}",
            r"sources\.new\.source: None -> 'two_digit_addition'",
        ),
    ):
        c = make_configuration(tmp_path, *mixture_overrides(tmp_path, other))
        with pytest.raises(Failure, match=words):
            resume_point.changed_settings(c)


@pytest.mark.slow
def test_two_spellings_of_a_path_are_the_same_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "rollouts")
    mode = ("mode=train_only", "run.resume=auto")
    c = make_configuration(tmp_path, *mode, f"rollout.recording={tmp_path}/rollouts")
    resume_point = ResumePoint(tmp_path, make_state(5, flat_configuration(c)))
    for path in ("rollouts", "./link", f"{tmp_path}/link/../rollouts"):
        c = make_configuration(tmp_path, *mode, f"rollout.recording={path}")
        assert resume_point.changed_settings(c) == []
    with pytest.raises(Failure, match=r"rollout\.recording: '.*rollouts' -> '.'"):
        resume_point.changed_settings(make_configuration(tmp_path, *mode, "rollout.recording=."))


@pytest.mark.slow
@pytest.mark.parametrize(
    "override", ["model.recompute=full", "model.dtype=bfloat16", "model.spec=local"]
)
def test_settings_of_the_model_can_change(tmp_path: Path, override: str) -> None:
    settings = flat_configuration(make_configuration(tmp_path))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    changes = resume_point.changed_settings(make_configuration(tmp_path, override))
    # engine.dtype follows model.dtype
    assert any(change.startswith(override.partition("=")[0]) for change in changes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [["mode=eval"], ["mode=profile", "data.pass_rates=rates.jsonl"]])
def test_a_measurement_lists_changed_data_alone(tmp_path: Path, mode: list[str]) -> None:
    settings = flat_configuration(make_configuration(tmp_path))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    overrides = ("data.num_eval=7", "optimizer.lr=0.7")
    c = make_configuration(tmp_path, *mode, f"run.resume={tmp_path}", *overrides)
    changes = resume_point.changed_settings(c)
    assert "data.num_eval: 128 -> 7" in changes
    assert all(change.startswith("data.") for change in changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        "data.num_eval=7",
        "seed=7",
        "model.init=random",
        "mode=rollout_only",
        "rollout.prompts_per_step=8",
        "curriculum=[{name: short, until: {steps: 1}}, {name: last}]",
    ],
)
def test_settings_that_give_the_state_its_meaning_cannot_change(
    tmp_path: Path, override: str
) -> None:
    settings = flat_configuration(make_configuration(tmp_path))
    resume_point = ResumePoint(tmp_path, make_state(5, settings))
    with pytest.raises(Failure, match=override.partition("=")[0]):
        resume_point.changed_settings(make_configuration(tmp_path, override))
