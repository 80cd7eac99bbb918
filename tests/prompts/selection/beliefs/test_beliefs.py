import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.beliefs.arcsine import predict
from megatron_rl.prompts.selection.beliefs.beliefs import Beliefs
from megatron_rl.prompts.selection.beliefs.group_prediction import GroupPredictions
from tests.support.answers import make_pool
from tests.support.groups import group

POOL = make_pool(40, tags=2)
IDS = [prompt.id for prompt in POOL]
ALL_INCORRECT = [0.0] * 8
ALL_CORRECT = [1.0] * 8
HALF_CORRECT = [1.0] * 4 + [0.0] * 4
NEW_PROMPT = Prompt(id="new", token_ids=(1,), answer="1", task="t", difficulty="1")


def group_of(prompt: Prompt, *scores: Verdict | float | None) -> Group:
    return msgspec.structs.replace(group(*scores, name=prompt.id), prompt=prompt)


def probability(beliefs: Beliefs, prompt: Prompt, step: int, samples: int = 8) -> float:
    """Probability of a mixed group of `samples` rollouts."""
    (prediction,) = GroupPredictions(beliefs, step, (samples,)).of(prompt, beliefs.row(prompt))
    return prediction.mixed_probability


def test_uninformative_probability_by_hand() -> None:
    assert probability(Beliefs(IDS), POOL[0], 1) == pytest.approx(0.66666, abs=1e-4), "V = 1/4"


def test_groups_change_the_belief_about_their_prompt() -> None:
    beliefs = Beliefs(IDS)
    uninformative = probability(beliefs, POOL[0], 1)
    beliefs.observe(1, [group_of(POOL[0], *ALL_INCORRECT), group_of(POOL[2], *HALF_CORRECT)])
    after_one = probability(beliefs, POOL[0], 2)
    assert after_one < 0.35 < uninformative < 0.9 < probability(beliefs, POOL[2], 2)
    beliefs.observe(3, [group_of(POOL[0], *ALL_INCORRECT)])
    assert probability(beliefs, POOL[0], 4) < 0.25 < after_one


def test_certainty_decreases_with_time() -> None:
    beliefs = Beliefs(IDS)
    beliefs.observe(1, [group_of(POOL[0], *ALL_INCORRECT)])
    assert probability(beliefs, POOL[0], 2) < probability(beliefs, POOL[0], 200)


def test_inflated_variance_makes_beliefs_uninformative() -> None:
    beliefs = Beliefs(IDS)
    beliefs.observe(1, [group_of(POOL[0], *ALL_INCORRECT)])
    assert probability(beliefs, POOL[0], 2) < 0.35
    beliefs.inflate_variance()
    assert len(beliefs) == 1
    assert probability(beliefs, POOL[0], 2) > 0.5


def test_prompts_without_group_start_from_their_stratum() -> None:
    beliefs = Beliefs(IDS)
    incorrect = [group_of(prompt, *ALL_INCORRECT) for prompt in POOL[0:20:2]]
    mixed_groups = [group_of(prompt, *HALF_CORRECT) for prompt in POOL[1:20:2]]
    beliefs.observe(1, incorrect + mixed_groups)
    low = probability(beliefs, POOL[20], 2)
    high = probability(beliefs, POOL[21], 2)
    assert low < 0.5 < 0.85 < high
    other_stratum = Prompt(id="x", token_ids=(1,), answer="1", task="another", difficulty="0")
    assert low < probability(beliefs, other_stratum, 2) < high, "the shared prior"


def stratum_after_change(step: int) -> float:
    """Probability of a new prompt if its stratum becomes mixed in `step`."""
    beliefs = Beliefs(IDS)
    beliefs.observe(1, [group_of(prompt, *ALL_INCORRECT) for prompt in POOL[0:20:2]])
    beliefs.observe(step, [group_of(prompt, *HALF_CORRECT) for prompt in POOL[20:28:2]])
    return probability(beliefs, POOL[30], step + 1)


def test_past_groups_of_a_stratum_decay() -> None:
    assert stratum_after_change(500) > 0.7 > 0.5 > stratum_after_change(2)


def state_after(*scores: float) -> BeliefState:
    beliefs = Beliefs()
    beliefs.observe(1, [group_of(POOL[0], *scores)])
    return beliefs.state()


def test_partial_correctness_counts_as_its_sum() -> None:
    assert state_after(0.5, 0.5, 0.75, 0.25) == state_after(1.0, 0.0, 1.0, 0.0)


def test_correctness_is_clipped() -> None:
    assert state_after(7.0, -3.0, 1.0, 0.0) == state_after(1.0, 0.0, 1.0, 0.0)


def test_equal_correctness_above_one_half_counts_as_all_correct() -> None:
    assert state_after(0.75, 0.75, 0.75, 0.75) == state_after(1.0, 1.0, 1.0, 1.0)


def had_group(beliefs: Beliefs, prompt: Prompt) -> bool:
    state = beliefs.state()
    steps = dict(zip(state.prompts, np.frombuffer(state.last_group_steps, np.int32), strict=True))
    return bool(steps.get(prompt.id, -1) > 0)


def test_groups_with_too_few_verdicts_are_no_observation_but_count_as_groups() -> None:
    beliefs = Beliefs(IDS)
    beliefs.observe(1, [group_of(POOL[0], 1.0, 0.0)])
    before = probability(beliefs, POOL[0], 9)
    beliefs.observe(9, [group_of(POOL[0], None, 1.0), group_of(POOL[1], None, None)])
    assert probability(beliefs, POOL[0], 9) == pytest.approx(before, abs=1e-6)
    assert had_group(beliefs, POOL[1]) and not had_group(beliefs, POOL[3])
    without_group = probability(beliefs, POOL[3], 9)
    assert without_group == pytest.approx(probability(beliefs, POOL[1], 9), abs=0.01)


def reward_only(reward: float) -> Verdict:
    return Verdict(reward=reward, correctness=None)


def test_groups_without_correctness_are_no_observation_but_count_as_groups() -> None:
    beliefs = Beliefs(IDS)
    prior = beliefs.stratum_prior(("t", "0"))
    different = group_of(POOL[0], reward_only(0.9), reward_only(0.8))
    equal = group_of(POOL[1], reward_only(1.0), reward_only(1.0))
    beliefs.observe(1, [different, equal])
    assert beliefs.stratum_prior(("t", "0")) == prior == beliefs.stratum_prior(("t", "1"))
    without_group = probability(beliefs, POOL[3], 1)
    assert probability(beliefs, POOL[0], 1) == pytest.approx(without_group, abs=1e-6)
    assert had_group(beliefs, POOL[1])


def test_correctness_that_is_not_finite_counts_as_missing() -> None:
    not_finite = Verdict(reward=1.0, correctness=math.nan)
    states = []
    for scores in ((1.0, not_finite, 0.0), (1.0, None, 0.0)):
        beliefs = Beliefs(IDS)
        beliefs.observe(1, [group_of(POOL[0], *scores)])
        states.append(beliefs.state())
    assert states[0] == states[1]


def test_declines_count_from_the_last_group() -> None:
    beliefs = Beliefs(IDS)
    row = beliefs.row(POOL[0])
    for _ in range(3):
        beliefs.count_decline(row)
    beliefs.count_decline(beliefs.row(POOL[1]))
    assert beliefs.row(POOL[0]) == row
    assert beliefs.declines(row) == 3 == beliefs.max_declines()
    beliefs.observe(9, [group_of(POOL[0], 1.0, 0.0)])
    assert beliefs.declines(row) == 0
    assert beliefs.max_declines() == 1


def test_without_prompts_there_are_no_declines() -> None:
    assert Beliefs(IDS).max_declines() == 0


def test_only_offered_prompts_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts and strata there are."""
    pool = make_pool(500, tags=100)
    beliefs = Beliefs([prompt.id for prompt in pool])
    beliefs.observe(1, [group_of(prompt, *HALF_CORRECT) for prompt in pool])
    calls = []

    def count(*arguments: float) -> tuple[float, float]:
        calls.append(arguments)
        return predict(*arguments)

    monkeypatch.setattr("megatron_rl.prompts.selection.beliefs.beliefs.predict", count)
    predictions = GroupPredictions(beliefs, 2, (8, 4))
    for prompt in pool[:7]:
        predictions.of(prompt, beliefs.row(prompt))
    assert len(calls) == 7


def test_drift_is_estimated_from_all_prompts() -> None:
    rng = np.random.default_rng(0)
    beliefs = Beliefs()
    logits = rng.normal(-1, 1, 40)
    for step in range(1, 151):
        logits += 0.02
        if step % 5 == 0:
            correct = rng.random((40, 16)) < 1 / (1 + np.exp(-logits))[:, None]
            pairs = zip(POOL, correct.astype(float).tolist(), strict=True)
            beliefs.observe(step, [group_of(prompt, *scores) for prompt, scores in pairs])
    assert beliefs.drift == pytest.approx(0.02 / 4, rel=0.4)


def test_drift_sums_by_hand() -> None:
    beliefs = Beliefs()
    beliefs.observe(1, [group_of(POOL[0], *[1.0] * 2, *[0.0] * 6)])
    mean = float(np.frombuffer(beliefs.state().means, np.float32)[0])
    variance = float(np.frombuffer(beliefs.state().variances, np.float32)[0])
    beliefs.observe(6, [group_of(POOL[0], *HALF_CORRECT)])
    slope = 5 * np.sin(2 * mean)
    expected_variance = variance + 5 * 2e-4 + 1 / 34
    error = np.pi / 4 - mean
    sums = (slope * error / expected_variance, slope**2 / expected_variance)
    assert beliefs.state().drift == pytest.approx(sums)
    assert beliefs.drift == pytest.approx(sums[0] / (sums[1] + 2.5e5))


def test_drift_sums_decay_and_ignore_first_groups() -> None:
    beliefs = Beliefs()
    beliefs.observe(1, [group_of(POOL[0], *HALF_CORRECT)])
    beliefs.observe(6, [group_of(POOL[0], *ALL_CORRECT)])
    sums = beliefs.state().drift
    beliefs.observe(16, [group_of(POOL[1], 1.0, 0.0)])
    assert beliefs.state().drift == pytest.approx([0.98**10 * value for value in sums])


def observe_tag(
    beliefs: Beliefs, rate: Callable[[int], float], steps: range, tag: str = "0"
) -> None:
    """Observe all prompts of a tag in every fourth step, with a pass rate by step."""
    prompts = [prompt for prompt in POOL if prompt.difficulty == tag]
    rng = np.random.default_rng(0)
    for step in steps[::4]:
        groups = [group_of(prompt, *map(float, rng.random(8) < rate(step))) for prompt in prompts]
        beliefs.observe(step, groups)


def alternating_rate(step: int) -> float:
    return 0.9 if step // 4 % 2 else 0.1


def constant_rate(step: int) -> float:
    return 0.5


def test_process_noise_grows_where_pass_rates_change() -> None:
    beliefs = Beliefs(IDS)
    observe_tag(beliefs, constant_rate, range(1, 41))
    observe_tag(beliefs, constant_rate, range(3, 41), tag="1")
    before = beliefs.stratum_process_noise(("t", "0"))
    assert before == pytest.approx(2e-4, abs=2e-4)
    observe_tag(beliefs, alternating_rate, range(41, 81))
    changing = beliefs.stratum_process_noise(("t", "0"))
    new = beliefs.stratum_process_noise(("t", "new"))
    constant = beliefs.stratum_process_noise(("t", "1"))
    assert changing > 0.01 > 10 * before
    assert changing > new > constant
    assert beliefs.process_noise == new, "a new stratum has the shared rate"


def test_beliefs_about_hopeless_prompts_become_uncertain_where_others_change() -> None:
    probabilities = []
    for rate in (constant_rate, alternating_rate):
        beliefs = Beliefs(IDS)
        beliefs.observe(0, [group_of(POOL[1], *ALL_INCORRECT)])
        observe_tag(beliefs, rate, range(1, 42))
        probabilities.append(probability(beliefs, POOL[1], 45))
    with_constant_rate, with_alternating_rate = probabilities
    assert with_constant_rate < 0.4 < 0.5 < with_alternating_rate


def beliefs_after_five_steps() -> Beliefs:
    rng = np.random.default_rng(0)
    beliefs = Beliefs(IDS)
    for step in range(1, 6):
        prompts = [POOL[i] for i in rng.permutation(40)[:15]]
        groups = [group_of(prompt, *map(float, rng.random(8) < 0.4)) for prompt in prompts]
        beliefs.observe(step, groups)
    return beliefs


def restored_beliefs(state: BeliefState, ids: list[str] = IDS) -> Beliefs:
    beliefs = Beliefs(ids)
    beliefs.restore(state)
    return beliefs


def test_restored_beliefs_continue_bit_for_bit() -> None:
    beliefs = beliefs_after_five_steps()
    state = beliefs.state([(1.0, 2.0, 3.0)])
    assert len(state.process_noise) == 3
    assert all(weight > 0 for _, _, (_, weight) in state.process_noise)
    copy = restored_beliefs(msgspec.json.decode(msgspec.json.encode(state), type=BeliefState))
    assert copy.state([(1.0, 2.0, 3.0)]) == state
    for each in (beliefs, copy):
        each.count_decline(each.row(NEW_PROMPT))
        each.count_decline(each.row(POOL[7]))
        each.observe(9, [group_of(POOL[3], 1.0, 0.0, 0.0), group_of(POOL[30], 0.0, 0.0)])
    assert copy.state() == beliefs.state()
    assert copy.drift == beliefs.drift


def test_a_state_without_process_noise_starts_from_the_minimum() -> None:
    state = msgspec.structs.replace(beliefs_after_five_steps().state(), process_noise=())
    beliefs = restored_beliefs(state)
    assert beliefs.process_noise == 2e-4 == beliefs.stratum_process_noise(("t", "0"))


def test_beliefs_about_prompts_outside_of_the_pool_are_kept() -> None:
    beliefs = beliefs_after_five_steps()
    state = beliefs.state()
    smaller = restored_beliefs(state, IDS[:10])
    num_outside = sum(prompt_id not in IDS[:10] for prompt_id in state.prompts)
    assert smaller.num_outside_pool == num_outside > 0
    assert probability(smaller, POOL[0], 6) == probability(beliefs, POOL[0], 6)
    larger = restored_beliefs(smaller.state())
    assert larger.num_outside_pool == 0
    assert larger.state().prompts[: len(state.prompts)] == state.prompts


def test_prompts_outside_of_the_pool_do_not_count_as_old() -> None:
    beliefs = beliefs_after_five_steps()
    for prompt, count in ((POOL[3], 2), (POOL[30], 5)):
        for _ in range(count):
            beliefs.count_decline(beliefs.row(prompt))
    assert beliefs.max_declines() == 5
    assert restored_beliefs(beliefs.state(), IDS[:10]).max_declines() == 2


def test_a_state_without_declines_starts_to_count_them() -> None:
    beliefs = beliefs_after_five_steps()
    beliefs.count_decline(beliefs.row(POOL[0]))
    state = beliefs.state()
    old_state = msgspec.json.decode(msgspec.json.encode(state))
    del old_state["declines"]
    old_state["last_update_steps"] = old_state["last_group_steps"]
    copy = restored_beliefs(msgspec.convert(old_state, BeliefState))
    assert copy.max_declines() == 0
    assert probability(copy, POOL[3], 9) == probability(beliefs, POOL[3], 9)
    copy.count_decline(copy.row(POOL[0]))
    assert copy.state() == state


def test_states_share_the_tuple_of_ids() -> None:
    beliefs = beliefs_after_five_steps()
    state = beliefs.state()
    beliefs.observe(6, [group_of(POOL[IDS.index(state.prompts[0])], 1.0, 0.0)])
    assert beliefs.state().prompts is state.prompts
    assert restored_beliefs(state).state().prompts is state.prompts
    beliefs.row(NEW_PROMPT)
    assert beliefs.state().prompts == (*state.prompts, "new")


def test_damaged_beliefs_are_refused() -> None:
    state = beliefs_after_five_steps().state()
    damage = {"declines": state.declines[:-1]}
    with pytest.raises(PromptDataError, match=r"run\.resume: .*damaged .*Give another"):
        Beliefs().restore(msgspec.structs.replace(state, **damage))


def test_a_state_from_before_the_first_offer_is_restored() -> None:
    beliefs = restored_beliefs(Beliefs().state())
    assert len(beliefs) == beliefs.max_declines() == beliefs.num_outside_pool == 0


def test_current_estimates_are_predictions_for_the_last_step() -> None:
    beliefs = Beliefs(IDS)
    beliefs.observe(1, [group_of(POOL[0], *HALF_CORRECT)])
    beliefs.observe(6, [group_of(POOL[1], 1.0, 0.0)])
    state = beliefs.state()
    stored_means = np.frombuffer(state.means, np.float32)
    stored_variances = np.frombuffer(state.variances, np.float32)
    means, variances = beliefs.current_estimates()
    assert means.tolist() == pytest.approx(stored_means.tolist())
    assert variances[1] == stored_variances[1], "it was observed in this step"
    growth = 5 * beliefs.process_noise
    assert variances[0] == pytest.approx(stored_variances[0] + growth, rel=1e-6)


def observe_two_strata() -> Beliefs:
    """Observe a stratum whose pass rates change, and one whose pass rates do not."""
    beliefs = Beliefs(IDS)
    observe_tag(beliefs, constant_rate, range(3, 41), tag="1")
    observe_tag(beliefs, alternating_rate, range(41, 81))
    return beliefs


@pytest.mark.parametrize("prompt", POOL[:2], ids=["changing", "constant"])
def test_a_group_updates_the_belief_that_was_predicted_for_its_step(prompt: Prompt) -> None:
    """The prediction has the process noise of the prompt's own stratum."""
    beliefs = observe_two_strata()
    row = beliefs.row(prompt)
    mean, variance = beliefs.estimate(prompt, row, 90)
    beliefs.observe(90, [group_of(prompt, *HALF_CORRECT)])
    gain = variance / (variance + 1 / 34)
    state = beliefs.state()
    new_mean = np.frombuffer(state.means, np.float32)[row]
    new_variance = np.frombuffer(state.variances, np.float32)[row]
    assert new_mean == pytest.approx(mean + gain * (np.pi / 4 - mean))
    assert new_variance == pytest.approx((1 - gain) * variance)


def test_groups_with_too_few_verdicts_estimate_no_dynamics() -> None:
    """Their sums only decay."""
    beliefs = Beliefs(IDS)
    beliefs.observe(1, [group_of(POOL[0], *ALL_INCORRECT)])
    beliefs.observe(5, [group_of(POOL[0], *HALF_CORRECT)])
    before = beliefs.state()
    beliefs.observe(8, [group_of(POOL[0], 1.0, None, None)])
    after = beliefs.state()
    assert after.drift == pytest.approx([0.98**3 * value for value in before.drift])
    for (*_, old_sums), (*_, sums) in zip(before.process_noise, after.process_noise, strict=True):
        assert sums == pytest.approx([0.98**3 * value for value in old_sums])
