from megatron_rl.prompts import two_digit_addition


def test_question_by_hand() -> None:
    question = two_digit_addition.question(12, 34)
    assert (question.text, question.answer, question.demonstration) == ("12+34=", "046", "046")
    assert question.difficulty == "2_digits"
    assert two_digit_addition.question(5, 99).answer == "104"


def test_the_difficulty_is_the_number_of_digits_of_the_sum() -> None:
    sums = ((4, 5), (5, 5), (0, 99), (1, 99))
    difficulties = [two_digit_addition.question(a, b).difficulty for a, b in sums]
    assert difficulties == ["1_digit", "2_digits", "2_digits", "3_digits"]


def test_both_orders_have_one_identity() -> None:
    question = two_digit_addition.question(7, 80)
    assert two_digit_addition.question(80, 7).identity == question.identity
    assert two_digit_addition.question(8, 70).identity != question.identity


def test_all_questions_come_once_in_an_order_by_seed() -> None:
    texts = [question.text for question in two_digit_addition.questions(0)]
    assert len(texts) == len(set(texts)) == 10_000
    assert [question.text for question in two_digit_addition.questions(1)] != texts
