import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.selection.belief import Beliefs
from tests.support.answers import make_pool
from tests.support.groups import group

POOL = make_pool(40, tags=2)
IDS = [prompt.id for prompt in POOL]


def of(prompt: Prompt, *scores: Verdict | float | None) -> Group:
    return msgspec.structs.replace(group(*scores, name=prompt.id), prompt=prompt)


def chance(beliefs: Beliefs, prompt: Prompt, step: int, samples: int = 8) -> float:
    row = beliefs.row(prompt, step)
    return beliefs.outlook(step, (samples,)).of(prompt, row)[0]


def test_a_first_group_moves_what_is_believed_of_its_prompt() -> None:
    beliefs = Beliefs(IDS)
    before = chance(beliefs, POOL[0], 1)
    assert before == pytest.approx(0.66666, abs=1e-4), "nothing is known: V = 1/4"
    beliefs.observe(1, [of(POOL[0], *[0.0] * 8), of(POOL[2], *[1.0] * 4, *[0.0] * 4)])
    assert chance(beliefs, POOL[0], 2) < 0.35 < before < 0.9 < chance(beliefs, POOL[2], 2)
    beliefs.observe(3, [of(POOL[0], *[0.0] * 8)])
    assert chance(beliefs, POOL[0], 4) < 0.25
    sure = chance(beliefs, POOL[0], 4)
    assert sure < chance(beliefs, POOL[0], 200), "certainty is lost with time"
    beliefs.widen()
    assert chance(beliefs, POOL[0], 4) > 0.5 > sure and 0 not in (len(beliefs),)


def test_a_new_prompt_is_believed_to_be_like_its_source_and_tag() -> None:
    beliefs = Beliefs(IDS)
    hopeless = [of(prompt, *[0.0] * 8) for prompt in POOL[0:20:2]]
    mixed = [of(prompt, *[1.0] * 4, *[0.0] * 4) for prompt in POOL[1:20:2]]
    beliefs.observe(1, hopeless + mixed)
    assert chance(beliefs, POOL[20], 2) < 0.5 < 0.85 < chance(beliefs, POOL[21], 2)
    other = Prompt(id="x", token_ids=(1,), answer="1", task="another", difficulty="0")
    assert (
        chance(beliefs, POOL[20], 2) < chance(beliefs, other, 2) < chance(beliefs, POOL[21], 2)
    ), "that of all"


def test_how_a_stratum_once_was_is_forgotten() -> None:
    beliefs = Beliefs(IDS)
    beliefs.observe(1, [of(prompt, *[0.0] * 8) for prompt in POOL[0:20:2]])
    beliefs.observe(500, [of(prompt, *[1.0] * 4, *[0.0] * 4) for prompt in POOL[20:28:2]])
    soon = Beliefs(IDS)
    soon.observe(1, [of(prompt, *[0.0] * 8) for prompt in POOL[0:20:2]])
    soon.observe(2, [of(prompt, *[1.0] * 4, *[0.0] * 4) for prompt in POOL[20:28:2]])
    assert chance(beliefs, POOL[30], 501) > 0.7 > 0.5 > chance(soon, POOL[30], 3)


def test_a_share_of_tests_passed_counts_as_a_share_of_an_answer() -> None:
    halves, binary, cut = Beliefs(), Beliefs(), Beliefs()
    halves.observe(1, [of(POOL[0], 0.5, 0.5, 0.75, 0.25)])
    binary.observe(1, [of(POOL[0], 1.0, 0.0, 1.0, 0.0)])
    cut.observe(1, [of(POOL[0], 7.0, -3.0, 1.0, 0.0)])
    assert halves.state() == binary.state() == cut.state()
    tied, right = Beliefs(), Beliefs()
    tied.observe(1, [of(POOL[0], 0.75, 0.75, 0.75, 0.75)])
    right.observe(1, [of(POOL[0], 1.0, 1.0, 1.0, 1.0)])
    assert tied.state() == right.state(), "flat is flat"


def test_a_group_without_verdicts_says_nothing_but_was_seen() -> None:
    beliefs = Beliefs(IDS)
    beliefs.observe(1, [of(POOL[0], 1.0, 0.0)])
    before = chance(beliefs, POOL[0], 9)
    beliefs.observe(9, [of(POOL[0], None, 1.0), of(POOL[1], None, None)])
    assert chance(beliefs, POOL[0], 9) == pytest.approx(before, abs=1e-6)
    assert beliefs.unseen_for(beliefs.row(POOL[1], 9), 12) == 3
    assert chance(beliefs, POOL[3], 9) == pytest.approx(chance(beliefs, POOL[1], 9), abs=0.01)


def judge(reward: float) -> Verdict:
    return Verdict(reward=reward, correctness=None)


def test_a_judges_rewards_are_no_pass_rate() -> None:
    beliefs = Beliefs(IDS)
    before = beliefs.prior(("t", "0"))
    beliefs.observe(1, [of(POOL[0], judge(0.9), judge(0.8)), of(POOL[1], judge(1.0), judge(1.0))])
    assert beliefs.prior(("t", "0")) == before == beliefs.prior(("t", "1"))
    assert chance(beliefs, POOL[0], 1) == pytest.approx(chance(beliefs, POOL[3], 1), abs=1e-6)
    assert beliefs.unseen_for(beliefs.row(POOL[1], 1), 3) == 2, "but they were seen"


def test_a_correctness_that_is_not_finite_spoils_no_belief() -> None:
    one, other = Beliefs(IDS), Beliefs(IDS)
    one.observe(1, [of(POOL[0], 1.0, Verdict(reward=1.0, correctness=math.nan), 0.0)])
    other.observe(1, [of(POOL[0], 1.0, None, 0.0)])
    assert one.state() == other.state()


def test_how_long_a_prompt_waits_counts_from_its_first_offer() -> None:
    beliefs = Beliefs(IDS)
    row = beliefs.row(POOL[0], 5)
    assert (
        beliefs.row(POOL[0], 9) == row
        and beliefs.unseen_for(row, 9) == 4
        and beliefs.oldest(9) == 4
    )
    beliefs.observe(9, [of(POOL[0], 1.0, 0.0)])
    assert beliefs.unseen_for(row, 9) == 0 == Beliefs(IDS).oldest(9)


def test_the_shared_drift_is_learnt_from_all() -> None:
    rng, beliefs = np.random.default_rng(0), Beliefs()
    logits = rng.normal(-1, 1, 40)
    for step in range(1, 301):
        logits += 0.02
        if step % 5 == 0:
            right = rng.random((40, 16)) < 1 / (1 + np.exp(-logits))[:, None]
            beliefs.observe(step, [of(p, *map(float, r)) for p, r in zip(POOL, right, strict=True)])
        if step == 150:
            assert beliefs.drift == pytest.approx(0.02 / 4, rel=0.4)


def test_what_the_shared_drift_is_learnt_from_by_hand() -> None:
    beliefs = Beliefs()
    beliefs.observe(1, [of(POOL[0], *[1.0] * 2, *[0.0] * 6)])
    mean, variance = (
        float(np.frombuffer(a, np.float32)[0])
        for a in (beliefs.state().means, beliefs.state().variances)
    )
    beliefs.observe(6, [of(POOL[0], *[1.0] * 4, *[0.0] * 4)])
    slope, spread = 5 * np.sin(2 * mean), variance + 5 * 2e-4 + 1 / 34
    assert beliefs.state().drift == pytest.approx(
        (slope * (np.pi / 4 - mean) / spread, slope**2 / spread)
    )
    assert beliefs.drift == pytest.approx(slope * (np.pi / 4 - mean) / (slope**2 + 2.5e5 * spread))
    before = beliefs.state().drift
    beliefs.observe(16, [of(POOL[1], 1.0, 0.0)])
    assert beliefs.state().drift == pytest.approx([0.98**10 * each for each in before]), (
        "a first group says nothing"
    )


def rising(beliefs: Beliefs, rate: Callable[[int], float], steps: range, tag: str = "0") -> None:
    """Every fourth step the prompts of the tag are asked."""
    asked = [prompt for prompt in POOL if prompt.difficulty == tag]
    rng = np.random.default_rng(0)
    for step in steps[::4]:
        beliefs.observe(
            step, [of(prompt, *map(float, rng.random(8) < rate(step))) for prompt in asked]
        )


def test_certainty_is_lost_faster_where_pass_rates_move() -> None:
    beliefs = Beliefs(IDS)
    rising(beliefs, lambda step: 0.5, range(1, 41))
    rising(beliefs, lambda step: 0.5, range(3, 41), tag="1")
    slow = beliefs.growth(("t", "0"))
    assert slow == pytest.approx(2e-4, abs=2e-4), "they stay as they are"
    rising(beliefs, lambda step: 0.9 if step // 4 % 2 else 0.1, range(41, 81))
    assert beliefs.growth(("t", "0")) > 0.01 > 10 * slow
    assert beliefs.growth(("t", "0")) > beliefs.growth(("t", "new")) > beliefs.growth(("t", "1")), (
        "strata differ"
    )
    assert beliefs.wander == beliefs.growth(("t", "new")), "that of all"


def test_a_hopeless_prompt_is_uncertain_soon_where_others_move() -> None:
    still, moving = Beliefs(IDS), Beliefs(IDS)
    for beliefs, rates in ((still, (0.5, 0.5)), (moving, (0.1, 0.9))):
        beliefs.observe(0, [of(POOL[1], *[0.0] * 8)])
        rising(beliefs, lambda step, rates=rates: rates[step // 4 % 2], range(1, 42))  # type: ignore[misc]
    assert chance(still, POOL[1], 45) < 0.4 < 0.5 < chance(moving, POOL[1], 45)


def grown(seed: int = 0) -> Beliefs:
    rng, beliefs = np.random.default_rng(seed), Beliefs(IDS)
    for step in range(1, 6):
        asked = rng.permutation(40)[:15]
        beliefs.observe(step, [of(POOL[i], *map(float, rng.random(8) < 0.4)) for i in asked])
    return beliefs


def test_restored_beliefs_go_on_bit_for_bit() -> None:
    beliefs, again = grown(), Beliefs(IDS)
    state = beliefs.state([(1.0, 2.0, 3.0)])
    again.restore(msgspec.json.decode(msgspec.json.encode(state), type=BeliefState))
    assert again.state([(1.0, 2.0, 3.0)]) == state
    for each in (beliefs, again):
        each.row(Prompt(id="new", token_ids=(1,), answer="1", task="t", difficulty="1"), 8)
        each.observe(9, [of(POOL[3], 1.0, 0.0, 0.0), of(POOL[30], 0.0, 0.0)])
    assert again.state() == beliefs.state() and again.drift == beliefs.drift
    assert len(state.process_noise) == 3 and all(weight > 0 for _, _, (_, weight) in state.process_noise)


def test_a_checkpoint_without_what_certainty_is_lost_by_begins_it_anew() -> None:
    again = Beliefs(IDS)
    again.restore(msgspec.structs.replace(grown().state(), process_noise=()))
    assert again.wander == 2e-4 == again.growth(("t", "0"))


def test_a_changed_pool_keeps_what_it_can() -> None:
    state = grown().state()
    smaller = Beliefs(IDS[:10])
    smaller.restore(state)
    assert smaller.aside == sum(prompt not in IDS[:10] for prompt in state.prompts) > 0
    assert chance(smaller, POOL[0], 6) == chance(grown(), POOL[0], 6)
    assert smaller.oldest(1000) == 1000 - min(
        int(since)
        for prompt, since in zip(state.prompts, np.frombuffer(state.last_update_steps, np.int32), strict=True)
        if prompt in IDS[:10]
    )
    back = Beliefs(IDS)
    back.restore(smaller.state())
    assert back.aside == 0 and back.state().prompts[: len(state.prompts)] == state.prompts


def test_what_every_step_asks_for_copies_no_ids() -> None:
    beliefs, again = grown(), Beliefs(IDS)
    state = beliefs.state()
    beliefs.observe(6, [of(POOL[IDS.index(state.prompts[0])], 1.0, 0.0)])
    assert beliefs.state().prompts is state.prompts
    beliefs.row(Prompt(id="new", token_ids=(1,), answer="1", task="t"), 7)
    assert beliefs.state().prompts == (*state.prompts, "new")
    again.restore(state)
    assert again.state().prompts is state.prompts


def test_damaged_beliefs_are_refused() -> None:
    state = grown().state()
    with pytest.raises(PromptDataError, match="beliefs are damaged"):
        Beliefs().restore(msgspec.structs.replace(state, last_update_steps=state.last_update_steps[:-1]))
