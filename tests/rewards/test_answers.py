"""Final answers in texts: extraction, comparison and run time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards.answers import (
    canonical,
    last_boxed,
    last_line,
    last_number,
    partial_number,
)
from tests.support.processor_time import processor_seconds

LENGTH = 100_000  # of long texts, in characters


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a11b05c11d10e17>170151", "170151"),
        ("a11b05c11d10e17", None),
        ("046", "046"),
        ("the answer is -12.", "-12"),
        ("12-5", None),
        ("x = (3)-4", None),
        ("= -4", "-4"),
        ("= \u22124", "\u22124"),
        ("12\u22125", None),
        ("1,234,567.50 dollars", "1,234,567.50"),
        ("one of 1,2,3", None),
        ("1234,567", None),
        ("3.", "3"),
        (".5", ".5"),
        ("x = -.5", "-.5"),
        ("wait...5", "5"),
        ("No.5", "5"),
        (r"11,\!090", r"11,\!090"),
        ("1.2.5", None),
        ("1e5", None),
        ("none", None),
        ("", None),
        ("１２", None),
        ("10²", None),
        ("1\x002", "2"),
        ("1\ufffd2", "2"),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb\n\n", "b"),
        ("a\n  b c \t", "b c"),
        ("only", "only"),
        ("\n \n", None),
        ("", None),
        ("a\r\nb\r\n", "b"),
    ],
)
def test_last_line(text: str, line: str | None) -> None:
    assert last_line(text) == line


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{1} then \boxed{ 2 }.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{}", None),
        (r"boxed{2}", None),
        (r"\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{9}}}"),
    ],
)
def test_last_boxed(text: str, contents: str | None) -> None:
    assert last_boxed(text) == contents


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("046", "46"),
        ("+7", "7"),
        ("-0", "0"),
        ("1,234", "1234"),
        ("3.50", "3.5"),
        ("3.0", "3"),
        (".5", "0.5"),
        ("-.50", "-0.5"),
        ("\u22125", "-5"),
        ("\u22120", "0"),
        (" a  b ", "ab"),
        ("$5$", "5"),
        (r"10{,}000", "10000"),
        (r"11,\!090", "11090"),
        ("- 5", "-5"),
        ("$$5$$", "5"),
        ("$ 5 $", "5"),
        ("( 1, 2 )", "(1,2)"),
        ("1, 2", "1,2"),
        ("x = 3 \n + y", "x=3+y"),
        ("2 3/4", "2  3 / 4"),
    ],
)
def test_equal_answers(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("46", "64"),
        ("-7", "7"),
        ("0.5", "5"),
        ("10", "1"),
        ("1.05", "1.5"),
        ("A", "a"),
        ("１", "1"),
        ("", "0"),
        ("1/2", "0.5"),
        ("1 2", "12"),
        ("1, 234", "1234"),
        ("1, 234", "1,234"),
        ("2 3/4", "23/4"),
        (r"2 3\pi", r"23\pi"),
        ("1 000", "1000"),
        ("1. 5", "1.5"),
        ("3 . 5", "3.5"),
        ("1\n2", "12"),
        ("5 - 2 1", "5 - 21"),
        ("1 , 234", "1234"),
        ("- 1 2", "-12"),
    ],
)
def test_different_answers(one: str, other: str) -> None:
    assert canonical(one) != canonical(other)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(number=st.integers(-(10**30), 10**30), zeros=st.integers(0, 3))
def test_integers_in_several_notations_are_equal(number: int, zeros: int) -> None:
    with_zeros = f"{'-' if number < 0 else ''}{'0' * zeros}{abs(number)}"
    assert (
        canonical(with_zeros)
        == canonical(f"{number:,}")
        == canonical(f"{number}.{'0' * (zeros + 1)}")
        == str(number)
    )
    assert last_number(f"so it is {number:,}!") == f"{number:,}"


@pytest.mark.parametrize(
    "text",
    [
        "1e5",
        "-2.5E-3",
        "2.e+3",
        "1/2",
        "1 / 2",
        "1.2.5",
        "1 000",
        "1\u202f000.5",
        "1'000",
        "1_000",
        "1234,567",
        "0,5",
        "2)-5",
        "12-5",
        "x-5",
        "- 5",
        "\u2212 5",
        "x\u22125",
        "10^5",
        "12:30",
        r"\frac{1}{2}",
        "10²",
        "３4",
        "3½",
        "2^{10}",
        "10^{-3}",
        r"\frac34",
        r"2\frac12",
        "5 cm^2",
        r"3\sqrt{2}",
        r"\sqrt{4}",
        "sqrt 16",
        r"\log_2 8",
        "log_{2} 8",
        "f(2)",
        "P(X = 2)",
        "(3, 4)",
        "(x, 4)",
        "(4, x)",
        r"[4, \infty)",
        r"(-\infty, 4]",
        r"\{1, 2\}",
        "1, 2, 3",
        "3 or 4",
        r"3 \text{ or } 4",
        "x=3, y=4",
        r"x = 3 \text{ or } x = 4",
        "2 hours 30 minutes",
        "2×16",
        "2**16",
        "2 * 16",
        "2 x 16",
        r"2 \cdot 16",
        "-(4)",
        "-$5",
        "minus 5",
        "12 -5",
        "2+5",
        "2x",
        "2π",
        r"2\pi",
        "5 + x",
        "5(x+1)",
        "(5)^x",
        "0.(3)",
        "0.333...",
        r"0.\overline{3}",
        r"0.1\bar{6}",
        "0.3\u0305",
        "3!",
        "|-5|",
        "±5",
        "x <= 5",
        "5 < x",
        "3 : 4",
        "5 million",
        r"5\text{ million}",
        "2 thirds",
        "1010_2",
        "1 & 2",
        r"10\,000",
    ],
)
def test_partial_numbers(text: str) -> None:
    assert partial_number(text) is not None
    assert last_number(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "text ... 42",
        "text...42",
        "#### 1,234.50",
        "x = -4",
        "x = \u22124",
        ".5",
        "-.5",
        "+7",
        "2 + 3 = 5",
        "the sum of 2 and 3 is 5",
        r"10{,}000",
        r"$11,\!090$",
        r"\$42",
        "US$42",
        r"42\%",
        r"\text{so it is }42",
        r"5\text{ cm}",
        r"5 \text{ cm}",
        r"90^\circ",
        r"$\boxed{x = 42}$.",
        r"x \approx 42",
        r"x &= 42 \\",
        r"\(42\)",
        "<answer>42</answer>",
        "答案是42。",
        "so it is 42!",
        "42 (forty-two)",
        "the 42nd",
        "5km",
        "(42)",
        "| 42 |",
        "42 - that is all",
        "Answer: 42",
        "**42**",
        r"\boxed{42}",
        "in 2024 42",
        "3 + 4 = 7\n120",
        "so\n---\n42",
        "5 km/h",
        "50%",
        "a11b05c11d10>17015",
        "a11b05>170<eos>",
        "a10b04c09d09>k9940",
        "k42",
        "none",
        "",
    ],
)
def test_whole_numbers_are_not_partial(text: str) -> None:
    assert partial_number(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "7" * LENGTH,
        "7," * (LENGTH // 2),
        "777," * (LENGTH // 4) + "7777",
        "-" * LENGTH,
        "." * LENGTH,
        "1." * (LENGTH // 2),
        r"\boxed{" * (LENGTH // 7),
        r"\boxed{" + "{" * LENGTH,
        r"\boxed{" + "{}" * (LENGTH // 2) + "}",
        "\\" * LENGTH,
        "\n" * LENGTH,
        " " * LENGTH,
        "$" * LENGTH + "5" + "$" * LENGTH,
        r"\text{" * 40 + "5" + r"\text{ }" * 40,
        "(, " * 60 + "5" + ", x" * 60,
        "(1, " + "\\pi " * 40 + "and so on",
        "(1, " + "\\ldots, " * 20,
        "\x00" * LENGTH,
        "٣" * (LENGTH // 2),
        "\ud800" * (LENGTH // 2),
    ],
    ids=[
        "digits",
        "digits and commas",
        "thousands",
        "minus signs",
        "dots",
        "digits and dots",
        "open boxes",
        "open braces",
        "closed braces",
        "backslashes",
        "line ends",
        "spaces",
        "dollars around a number",
        "open texts around a number",
        "values around a number",
        "commands after a number in an open bracket",
        "dots after a number in an open bracket",
        "null characters",
        "Arabic digits",
        "surrogates",
    ],
)
def test_long_texts_take_linear_time(text: str) -> None:
    """Quadratic time would be tens of seconds."""

    def find_all() -> None:
        for find in (last_number, last_line, last_boxed, canonical, partial_number):
            find(text)

    assert processor_seconds(find_all) < 0.4


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_is_read_without_errors(text: str) -> None:
    for find in (last_number, last_line, last_boxed):
        answer = find(text)
        assert answer is None or answer in text
    assert canonical(canonical(text)) == canonical(text)
