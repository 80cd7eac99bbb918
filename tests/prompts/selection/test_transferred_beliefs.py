"""Runs that start from the beliefs of another run: `selection.beliefs_from`."""

import functools
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.jsonl import is_line_id
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.beliefs.beliefs import Beliefs
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.prompts.source import PromptSource
from tests.prompts.selection.beliefs.test_beliefs import group_of, probability
from tests.support.answers import make_pool, play_steps

POOL = make_pool(400, tags=4)
OTHER_PROMPTS = make_pool(600, tags=4)[500:]
ROLLOUT = RolloutSettings(max_new_tokens=8, prompts_per_step=12, samples_per_prompt=8)
SELECTION = SelectionSettings(name="belief", beliefs_from="runs/before")
ORIGIN = "selection.beliefs_from=runs/before"


def make_source(
    pool: list[Prompt], rates: dict[str, PassRate] | None = None, *, seed: int = 0
) -> PromptSource:
    data = DataSettings(source="column_addition", seed=seed)
    return PromptSource(pool, pool[:1], data, rates=rates)


def make_selector(source: PromptSource) -> BeliefSelector:
    selector = open_selector(source, ROLLOUT, SELECTION, seed=0)
    assert isinstance(selector, BeliefSelector)
    return selector


def two_tags_solved(prompt: Prompt, sample: int) -> float:
    """Prompts with the tags 0 and 1 are all correct, others half of the time."""
    return float(prompt.difficulty in "01" or (sample + prompt.token_ids[0]) % 2)


def make_group(prompt: Prompt) -> Group:
    return group_of(prompt, *[two_tags_solved(prompt, sample) for sample in range(8)])


def opposite_group(prompt: Prompt) -> Group:
    return group_of(prompt, *[1 - two_tags_solved(prompt, sample) for sample in range(8)])


def saved_state(selector: BeliefSelector) -> SelectorState:
    return msgspec.json.decode(msgspec.json.encode(selector.state()), type=SelectorState)


def state_of_earlier_run(pool: list[Prompt]) -> SelectorState:
    """State of a run that was offered all prompts and sampled three of four, each about twice."""
    selector = make_selector(make_source(pool))
    for prompt in pool:
        selector.beliefs.row(prompt)
    prompts = [prompt for i, prompt in enumerate(pool) if i % 16 < 12]
    for step in range(1, 13):
        selector.beliefs.observe(step, [make_group(prompt) for prompt in prompts[step % 6 :: 6]])
    return saved_state(selector)


@functools.cache
def earlier_state() -> SelectorState:
    return state_of_earlier_run(POOL)


def beliefs_of(state: SelectorState) -> BeliefState:
    assert state.beliefs is not None
    return state.beliefs


def transfer(state: SelectorState, source: PromptSource) -> BeliefSelector:
    """Start a run from the beliefs of another run."""
    TransferredBeliefs(ORIGIN, state.prompts.digest, beliefs_of(state)).apply_to(source)
    return make_selector(source)


def means_of(state: SelectorState) -> dict[str, float]:
    """Mean by prompt id, of the prompts that were ever sampled."""
    beliefs = beliefs_of(state)
    means = np.frombuffer(beliefs.means, np.float32).tolist()
    steps = np.frombuffer(beliefs.last_group_steps, np.int32).tolist()
    rows = zip(beliefs.prompts, means, steps, strict=True)
    return {name: mean for name, mean, step in rows if step >= 0}


def test_beliefs_about_sampled_prompts_are_transferred() -> None:
    state = earlier_state()
    selector = transfer(state, make_source(POOL))
    new_state = selector.state()
    sampled_ids = set(means_of(state))
    assert len(sampled_ids) == 300
    assert set(beliefs_of(new_state).prompts) == sampled_ids < set(beliefs_of(state).prompts)
    assert means_of(new_state) == pytest.approx(means_of(state), abs=0.02)


def test_drift_process_noise_and_strata_are_transferred() -> None:
    state = earlier_state()
    selector = transfer(state, make_source(POOL))
    new_beliefs = beliefs_of(selector.state())
    assert new_beliefs.drift == beliefs_of(state).drift
    assert new_beliefs.process_noise == beliefs_of(state).process_noise
    solved_prior = selector.beliefs.stratum_prior(("t", "0"))[0]
    assert solved_prior > 1.1 > selector.beliefs.stratum_prior(("t", "2"))[0]


def test_weight_of_strata_is_limited() -> None:
    state = earlier_state()
    new_beliefs = beliefs_of(transfer(state, make_source(POOL)).state())
    assert beliefs_of(state).strata[0][2][0] > 50
    assert new_beliefs.strata[0][2][0] == pytest.approx(8)


def test_position_and_calibration_are_not_transferred() -> None:
    selector = transfer(earlier_state(), make_source(POOL))
    state = selector.state()
    assert (state.prompts.epoch, state.prompts.position) == (0, 0)
    assert state.prompts.postponed_indices == ()
    assert beliefs_of(state).window == ()
    assert beliefs_of(state).clock == 0
    assert selector.beliefs.max_declines() == 0


def observe_some(beliefs: Beliefs, *, confirm: bool) -> None:
    """Observe first groups of some sampled prompts, which confirm or contradict the beliefs."""
    sampled_ids = means_of(earlier_state())
    prompts = [prompt for prompt in POOL if prompt.id in sampled_ids]
    for step in (1, 2):
        some_prompts = prompts[step * 32 : step * 32 + 32]
        make = make_group if confirm else opposite_group
        beliefs.observe(step, [make(prompt) for prompt in some_prompts])


def test_transferred_beliefs_are_uninformative_at_first() -> None:
    beliefs = transfer(earlier_state(), make_source(POOL)).beliefs
    assert {beliefs.initial_belief(prompt, 1)[1] for prompt in POOL[:4]} == {0.25}


def test_first_groups_confirm_transferred_beliefs() -> None:
    beliefs = transfer(earlier_state(), make_source(POOL)).beliefs
    observe_some(beliefs, confirm=True)
    solved_prompt = POOL[352]
    assert beliefs.initial_belief(solved_prompt, 3)[1] < 0.1
    assert probability(beliefs, solved_prompt, 3) < 0.45
    beliefs.inflate_variance()
    assert beliefs.initial_belief(solved_prompt, 3)[1] == 0.25
    assert probability(beliefs, solved_prompt, 3) > 0.5


def test_first_groups_contradict_transferred_beliefs() -> None:
    beliefs = transfer(earlier_state(), make_source(POOL)).beliefs
    observe_some(beliefs, confirm=False)
    assert beliefs.initial_belief(POOL[352], 3)[1] > 0.24
    assert probability(beliefs, POOL[352], 3) > 0.5


CHANGED_POOL = [*POOL[:100], *OTHER_PROMPTS]


def prompt_by_id(prompt_id: str) -> Prompt:
    return next(prompt for prompt in CHANGED_POOL if prompt.id == prompt_id)


def test_beliefs_about_other_prompts_are_kept_and_counted() -> None:
    state = earlier_state()
    source = make_source(CHANGED_POOL)
    selector = transfer(state, source)
    sampled_ids = set(means_of(state))
    num_known = sum(prompt.id in sampled_ids for prompt in CHANGED_POOL)
    num_others = len(sampled_ids) - num_known
    assert selector.beliefs.num_outside_pool == num_others > 0
    note = source.notes()[2]
    assert f"about {num_known} of 200 training prompts" in note
    assert f"about {num_others} others" in note


def test_beliefs_about_other_prompts_are_in_the_new_checkpoints() -> None:
    state = earlier_state()
    selector = transfer(state, make_source(CHANGED_POOL))
    play_steps(selector, range(1, 4), two_tags_solved)
    new_state = saved_state(selector)
    assert set(means_of(state)) <= set(beliefs_of(new_state).prompts)
    next_selector = transfer(new_state, make_source(POOL))
    other_ids = set(means_of(new_state)) - {prompt.id for prompt in POOL}
    assert next_selector.beliefs.num_outside_pool == len(other_ids)


def test_unknown_prompts_start_from_their_stratum() -> None:
    selector = transfer(earlier_state(), make_source(CHANGED_POOL))
    prompt = prompt_by_id("p502")
    expectation = selector.beliefs.stratum_prior((prompt.task, prompt.difficulty))
    assert selector.beliefs.initial_belief(prompt, 1) == expectation


def test_rates_apply_to_unknown_prompts_only() -> None:
    rates = {
        "p500": PassRate(id="p500", correct=16, samples=16),
        "p1": PassRate(id="p1", correct=0, samples=16),
    }
    selector = transfer(earlier_state(), make_source(CHANGED_POOL, rates))
    assert selector.beliefs.initial_belief(prompt_by_id("p500"), 0)[0] > 1.4
    known_mean = selector.beliefs.initial_belief(prompt_by_id("p1"), 0)[0]
    assert known_mean == means_of(selector.state())["p1"] > 1.3


def test_few_known_prompts_are_noted() -> None:
    source = make_source([*POOL[:3], *OTHER_PROMPTS])
    transfer(earlier_state(), source)
    note = source.notes()[2]
    assert "about 3 of 103 training prompts" in note
    assert "fewer than half" in note


def test_no_note_without_transferred_beliefs() -> None:
    assert make_source(POOL).notes()[2] == ""


def test_beliefs_of_another_data_set_are_refused() -> None:
    state = earlier_state()
    words = rf"{ORIGIN}: .*{len(means_of(state))} prompts.*100 training prompts.*Give"
    with pytest.raises(PromptDataError, match=words):
        transfer(state, make_source(OTHER_PROMPTS))


LINE_POOL = [
    msgspec.structs.replace(prompt, id=f"data.train_path:{line}")
    for line, prompt in enumerate(POOL, 1)
]
OTHER_LINE_POOL = [
    msgspec.structs.replace(prompt, token_ids=(i + 1,)) for i, prompt in enumerate(LINE_POOL)
]


def test_line_ids_are_known_in_the_same_file() -> None:
    state = state_of_earlier_run(LINE_POOL)
    selector = transfer(state, make_source(LINE_POOL))
    assert selector.beliefs.num_outside_pool == 0
    assert len(selector.beliefs) == len(means_of(state))


def test_line_ids_are_unknown_in_another_file() -> None:
    state = state_of_earlier_run(LINE_POOL)
    with pytest.raises(PromptDataError, match=r"line of their file.*rows an `id`"):
        transfer(state, make_source(OTHER_LINE_POOL))


def test_line_ids_are_dropped_beside_other_ids() -> None:
    state = state_of_earlier_run([*LINE_POOL[:100], *POOL[100:]])
    selector = transfer(state, make_source([*OTHER_LINE_POOL[:10], *POOL]))
    assert selector.beliefs.num_outside_pool == 0
    assert not any(":" in name for name in means_of(selector.state()))


def test_errors_of_transferred_beliefs_change_only_the_stratum() -> None:
    selector = transfer(earlier_state(), make_source(POOL))
    beliefs = selector.beliefs
    drift = beliefs.drift
    process_noise = beliefs.process_noise
    prior = beliefs.stratum_prior(("t", "0"))[0]
    sampled_ids = means_of(selector.state())
    prompts = [p for p in POOL if p.difficulty == "0" and p.id in sampled_ids][:20]
    beliefs.observe(30, [group_of(prompt, *[0.0] * 8) for prompt in prompts])
    assert abs(beliefs.drift) <= abs(drift)
    assert beliefs.process_noise <= process_noise
    assert beliefs.stratum_prior(("t", "0"))[0] < prior - 0.2
    beliefs.observe(60, [group_of(prompt, *[1.0] * 8) for prompt in prompts])
    assert beliefs.drift > drift, "later groups are compared with this run's own"


def test_a_resumed_run_continues_with_its_own_beliefs() -> None:
    selector = transfer(earlier_state(), make_source(POOL, seed=1))
    play_steps(selector, range(1, 5), two_tags_solved)
    resumed_selector = transfer(earlier_state(), make_source(POOL, seed=1))
    resumed_selector.restore(saved_state(selector))
    results = play_steps(selector, range(5, 9), two_tags_solved)
    assert play_steps(resumed_selector, range(5, 9), two_tags_solved) == results
    assert resumed_selector.state() == selector.state()


def numbers(state: BeliefState, value: float, dtype: Any = np.float32) -> bytes:
    return np.full(len(state.prompts), value, dtype).tobytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: {"last_group_steps": state.last_group_steps[:-1]},
        lambda state: {"declines": numbers(state, -1, np.int32)},
        lambda state: {"strata": ()},
        lambda state: {"prompts": (state.prompts[1], *state.prompts[1:])},
        lambda state: {"means": numbers(state, np.nan)},
        lambda state: {"means": numbers(state, 2.0)},
        lambda state: {"variances": numbers(state, -1.0)},
        lambda state: {"last_group_steps": numbers(state, -7, np.int32)},
    ],
    ids=[
        "short",
        "declines",
        "no_strata",
        "twice",
        "nan",
        "large_mean",
        "negative_variance",
        "step",
    ],
)
def test_damaged_beliefs_are_refused(damage: Any) -> None:
    state = earlier_state()
    beliefs = beliefs_of(state)
    damaged_state = msgspec.structs.replace(
        state, beliefs=msgspec.structs.replace(beliefs, **damage(beliefs))
    )
    with pytest.raises(PromptDataError, match=rf"{ORIGIN}: .*damaged .*Give another"):
        transfer(damaged_state, make_source(POOL))
    with pytest.raises(PromptDataError, match=r"run\.resume: .*damaged .*Give another"):
        make_selector(make_source(POOL)).restore(damaged_state)


def test_beliefs_of_a_run_that_was_offered_nothing_are_refused() -> None:
    selector = make_selector(make_source(POOL))
    with pytest.raises(PromptDataError, match=r"beliefs about 0 prompts.*Give a run on this data"):
        transfer(saved_state(selector), make_source(POOL))


def test_only_sampled_lines_are_counted_in_the_remedy() -> None:
    """Lines that were only offered do not count."""
    state = state_of_earlier_run([*LINE_POOL[:200], *OTHER_PROMPTS[:100]])
    num_lines = sum(is_line_id(name) for name in means_of(state))
    assert 0 < num_lines < 200
    with pytest.raises(PromptDataError, match=rf"run\. {num_lines} prompts are identified"):
        transfer(state, make_source(POOL))


def test_strata_with_few_groups_keep_their_moments() -> None:
    earlier = make_selector(make_source(POOL))
    for prompt in POOL[:5]:
        earlier.beliefs.row(prompt)
    earlier.beliefs.observe(1, [make_group(prompt) for prompt in POOL[:5]])
    state = saved_state(earlier)
    assert beliefs_of(state).strata[0][2][0] == 5
    new_beliefs = beliefs_of(transfer(state, make_source(POOL)).state())
    assert new_beliefs.strata == beliefs_of(state).strata


def test_all_moments_of_a_stratum_are_scaled_alike() -> None:
    state = earlier_state()
    new_beliefs = beliefs_of(transfer(state, make_source(POOL)).state())
    pairs = zip(beliefs_of(state).strata, new_beliefs.strata, strict=True)
    for (*_, old_sums), (*_, new_sums) in pairs:
        assert old_sums[0] > 8
        assert new_sums == pytest.approx([8 / old_sums[0] * value for value in old_sums])


def test_strata_without_a_group_are_transferred() -> None:
    """The earlier run's scorer gave too few verdicts."""
    earlier = make_selector(make_source(POOL))
    earlier.beliefs.observe(1, [group_of(prompt, 1.0, None) for prompt in POOL[:5]])
    state = saved_state(earlier)
    assert beliefs_of(state).strata[0][2] == (0, 0, 0, 0)
    assert beliefs_of(transfer(state, make_source(POOL)).state()).strata[0][2] == (0, 0, 0, 0)


def test_inflated_variance_leaves_transferred_beliefs_to_be_confirmed() -> None:
    """Their own variance remains. They are uninformative by the extra variance."""
    selector = transfer(earlier_state(), make_source(POOL))
    before = beliefs_of(selector.state())
    sampled_prompt = next(prompt for prompt in POOL if prompt.id in before.prompts)
    selector.beliefs.observe(1, [make_group(sampled_prompt)])
    selector.beliefs.inflate_variance()
    after = beliefs_of(selector.state())
    row = after.prompts.index(sampled_prompt.id)
    old_variances = np.frombuffer(before.variances, np.float32)
    new_variances = np.frombuffer(after.variances, np.float32)
    assert new_variances[row] == 0.25
    assert np.delete(new_variances, row).tolist() == np.delete(old_variances, row).tolist()


def test_current_estimates_of_transferred_beliefs_have_the_extra_variance() -> None:
    """Another run that starts from this one does not believe them more than this one does."""
    beliefs = transfer(earlier_state(), make_source(POOL)).beliefs
    observe_some(beliefs, confirm=True)
    state = beliefs.state()
    steps = np.frombuffer(state.last_group_steps, np.int32)
    _, variances = beliefs.current_estimates()
    with_group = variances[steps == 2]
    without_group = variances[steps == 0]
    assert len(with_group) == 32
    stored_variances = np.frombuffer(state.variances, np.float32)
    assert with_group.tolist() == stored_variances[steps == 2].tolist()
    prompt = next(p for p in POOL if p.id == state.prompts[int(np.flatnonzero(steps == 0)[0])])
    _, initial_variance = beliefs.initial_belief(prompt, 2)
    assert without_group[0] == pytest.approx(initial_variance, rel=0.02)
    assert without_group[0] > 1.2 * stored_variances[steps == 0][0]
