from megatron_rl.prompts import two_digit_addition


def test_by_hand() -> None:
    question = two_digit_addition.question(12, 34)
    assert (question.text, question.answer, question.demonstration) == ("12+34=", "046", "046")
    assert two_digit_addition.question(5, 99).answer == "104"


def test_both_orders_are_one_question() -> None:
    assert (
        two_digit_addition.question(7, 80).identity == two_digit_addition.question(80, 7).identity
    )
    assert (
        two_digit_addition.question(7, 80).identity != two_digit_addition.question(8, 70).identity
    )


def test_all_questions_come_once_in_an_order_of_the_seed() -> None:
    first = [q.text for q in two_digit_addition.questions(0)]
    assert len(first) == len(set(first)) == 10_000
    assert [q.text for q in two_digit_addition.questions(1)] != first
