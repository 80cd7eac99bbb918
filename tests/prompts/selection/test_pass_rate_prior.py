"""Beliefs that begin with the pass rates of `data.pass_rates`."""

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.pass_rates import PassRate
from megatron_rl.prompts.selection.belief import Beliefs
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.source import PromptSource
from tests.support.answers import make_pool, play, play_steps
from tests.support.groups import group

POOL = make_pool(40, tags=2)
IDS = [prompt.id for prompt in POOL]


def rates(*of: tuple[int, int]) -> dict[str, PassRate]:
    """(right, samples) of the first prompts."""
    return {
        id_: PassRate(id=id_, right=right, samples=n)
        for id_, (right, n) in zip(IDS, of, strict=False)
    }


def of(prompt: Prompt, *scores: float) -> Group:
    return msgspec.structs.replace(group(*scores, name=prompt.id), prompt=prompt)


def test_a_belief_begins_with_the_rate_and_is_as_sure_as_its_samples() -> None:
    beliefs = Beliefs(IDS, rates((16, 16), (0, 16), (8, 16), (2, 4), (0, 0)))
    (solved, v16), (hopeless, _), (half, v_half), (_, v4) = (
        beliefs.start(prompt, 0) for prompt in POOL[:4]
    )
    # nothing known: mean pi/4, V = 1/4; a flat group of 16: R = 1/32; a mixed one: R = 1/66, of 4:
    # 1/18
    assert v16 == pytest.approx(0.25 / 32 / (0.25 + 1 / 32)) and v_half == pytest.approx(
        0.25 / 66 / (0.25 + 1 / 66)
    )
    assert v4 == pytest.approx(0.25 / 18 / (0.25 + 1 / 18))
    assert (
        solved > 1.4
        and hopeless == pytest.approx(np.pi / 2 - solved)
        and half == pytest.approx(np.pi / 4)
    )
    assert beliefs.start(POOL[4], 0) == beliefs.start(POOL[6], 0) == beliefs.prior(("t", "0")), (
        "no samples, no rate"
    )
    after = beliefs.start(POOL[0], 100)
    assert after[1] == pytest.approx(v16 + 100 * 2e-4), "certainty is lost while the policy learns"


def test_what_is_drawn_is_learnt_on_top_of_the_rate() -> None:
    beliefs = Beliefs(IDS, rates((16, 16)))
    mean, variance = beliefs.start(POOL[0], 1)
    beliefs.observe(1, [of(POOL[0], *[0.0] * 8)])
    state = beliefs.state()
    gain = variance / (variance + 1 / 16)
    assert np.frombuffer(state.means, np.float32)[0] == pytest.approx(mean * (1 - gain))
    assert state.drift == (0.0, 0.0) and beliefs.wander == 2e-4, (
        "another model's rates are no drift of this one"
    )


def test_rates_that_are_wrong_are_believed_less_and_less() -> None:
    kept, wrong = Beliefs(IDS, rates(*[(16, 16)] * 40)), Beliefs(IDS, rates(*[(16, 16)] * 40))
    before = kept.start(POOL[-1], 3)[1]
    for step in (1, 2):
        some = POOL[8 * step : 8 * step + 8]
        kept.observe(step, [of(prompt, *[1.0] * 8) for prompt in some])
        wrong.observe(step, [of(prompt, *[0.0] * 8) for prompt in some])
    assert kept.start(POOL[-1], 3)[1] == before
    assert wrong.start(POOL[-1], 3)[1] == 0.25, "nothing is known"
    kept.widen()
    assert kept.start(POOL[-1], 3)[1] == 0.25


def test_a_checkpoint_wins_over_rates_and_goes_on_bit_for_bit() -> None:
    beliefs = Beliefs(IDS, rates(*[(16, 16)] * 20))
    beliefs.observe(1, [of(POOL[0], *[0.0] * 8), of(POOL[1], 1.0, 0.0)])
    state = msgspec.json.decode(msgspec.json.encode(beliefs.state()), type=BeliefState)
    again, other = Beliefs(IDS, rates(*[(16, 16)] * 20)), Beliefs(IDS, rates(*[(3, 16)] * 20))
    for each in (again, other):
        each.restore(state)
    chances = [
        [each.outlook(2, (8,)).of(prompt, each.row(prompt, 2)) for prompt in POOL]
        for each in (beliefs, again, other)
    ]
    assert chances[0] == chances[1] and again.state() == beliefs.state()
    assert chances[2][:2] == chances[0][:2], "of what was drawn the checkpoint speaks"
    assert chances[2][2:20] != chances[0][2:20] and chances[2][20:] == chances[0][20:]
    before = Beliefs(IDS)
    before.restore(msgspec.json.decode(msgspec.json.encode(Beliefs(IDS).state()), type=BeliefState))
    assert before.state().rated == (0.0, 0.0)


def selector(known: dict[str, PassRate]) -> BeliefSelector:
    data, pool = DataSettings(source="column_addition"), make_pool(400, tags=4)
    rollout = RolloutSettings(max_new_tokens=8, prompts_per_step=12, samples_per_prompt=8)
    return BeliefSelector(
        PromptSource(pool, pool[:1], data, rates=known),
        rollout,
        SelectionSettings(name="belief"),
        seed=0,
    )


def solved_or_half(prompt: Prompt, sample: int) -> float:
    """Tags 0 and 1 are solved."""
    return float(prompt.difficulty in "01" or (sample + prompt.token_ids[0]) % 2)


def test_a_run_with_pass_rates_skips_what_is_solved_from_its_first_step() -> None:
    share = {"0": 16, "1": 16, "2": 8, "3": 8}
    known = {
        p.id: PassRate(id=p.id, right=share[p.difficulty], samples=16)
        for p in make_pool(400, tags=4)
    }
    with_rates, without = selector(known).select(1), selector({}).select(1)
    for step in (with_rates, without):
        play(step, solved_or_half)
    assert with_rates.metrics()["select/rollouts"] < 0.75 * without.metrics()["select/rollouts"]
    assert with_rates.metrics()["select/mixed"] >= 0.9 * 12


def test_a_resumed_run_with_pass_rates_chooses_as_one_that_was_never_stopped() -> None:
    known = {
        p.id: PassRate(id=p.id, right=i % 17, samples=16)
        for i, p in enumerate(make_pool(400, tags=4))
    }
    whole, first, resumed = selector(known), selector(known), selector(known)
    play_steps(whole, range(1, 5), solved_or_half), play_steps(first, range(1, 5), solved_or_half)
    resumed.restore(msgspec.json.decode(msgspec.json.encode(first.state()), type=SelectorState))
    steps = range(5, 10)
    assert play_steps(resumed, steps, solved_or_half) == play_steps(whole, steps, solved_or_half)
    assert resumed.state() == whole.state() and resumed.state().beliefs.rated[1] > 0  # type: ignore[union-attr]
