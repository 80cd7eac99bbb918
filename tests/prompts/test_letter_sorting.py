import asyncio
import itertools
import string

from megatron_rl.config.schema import DataSettings, RewardSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts import letter_sorting
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.rewards import ExactMatch, open_answer_reader
from tests.support.character_tokenizer import CHARACTERS
from tests.support.scripted_model import TOKENIZER


def first_questions(n: int, seed: int = 0) -> list[letter_sorting.Question]:
    return list(itertools.islice(letter_sorting.questions(seed), n))


def test_answers_are_the_letters_in_order() -> None:
    for question in first_questions(500):
        letters = question.text.removesuffix("=")
        assert question.answer == question.demonstration == "".join(sorted(letters))
        assert question.difficulty == f"{len(letters)}_letters"
        assert set(question.text) <= set(CHARACTERS)


def test_lengths_and_letters_are_uniform() -> None:
    questions = first_questions(4000)
    for number in letter_sorting.NUM_LETTERS:
        share = sum(q.difficulty == f"{number}_letters" for q in questions) / 4000
        assert abs(share - 0.25) < 0.03
    letters = "".join(q.answer for q in questions)
    for letter in string.ascii_lowercase:
        assert abs(letters.count(letter) / len(letters) - 1 / 26) < 0.008


def test_all_orders_of_the_same_letters_are_on_one_side() -> None:
    assert letter_sorting.question("cab").identity == letter_sorting.question("bca").identity
    data = DataSettings(source="letter_sorting", num_train=3000, num_eval=300)
    source = open_prompts(data, TOKENIZER, open_answer_reader(RewardSettings(answer="last_line")))
    assert not {p.answer for p in source.train} & {p.answer for p in source.held_out}
    assert first_questions(5) == first_questions(5) != first_questions(5, seed=1)


async def score(tokenizer: Tokenizer, response: str) -> float | None:
    question = letter_sorting.question("dcab")
    tokens = tokenizer.encode(question.text)
    prompt = Prompt(id="q", token_ids=tokens, answer=question.answer, task="t")
    verdict = await ExactMatch("last_line").score(prompt, response, FinishReason.STOP)
    return verdict.correctness


async def scores(*responses: str) -> list[float | None]:
    return [await score(TOKENIZER, response) for response in responses]


def test_only_the_whole_answer_is_correct() -> None:
    assert asyncio.run(scores("abcd", "abc", "abcdd", "dcab")) == [1.0, 0.0, 0.0, 0.0]
