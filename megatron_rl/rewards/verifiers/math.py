r"""Judges mathematical answers by value: `\frac{1}{2}`, `0.5` and `\dfrac12` are one answer.

math-verify compares, and latex2sympy reads LaTeX. Neither of them executes text: math-verify's
reader of plain expressions, which does, is not used.
"""

from __future__ import annotations

import re
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import convert_to_pct, normalize_latex
from math_verify import LatexExtractionConfig
from math_verify.grader import sympy_expr_eq
from math_verify.parser import parse_latex_cached

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.rewards.answers import canonical, last_boxed, last_line, last_number
from megatron_rl.rewards.verifiers.math_limits import is_computable, is_solvable, is_within_limits
from megatron_rl.rewards.verifiers.verifier import Verifier

type Expression = sympy.Basic | sympy.MatrixBase

_NORMALIZATION = LatexExtractionConfig().normalization_config
_MARKER = re.compile(r"(?:\banswer\b(?:\s+is\b)?\s*:?|####)", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_DELIMITERS = re.compile(r"^(?:\$\$?|\\\(|\\\[)\s*|\s*(?:\$\$?|\\\)|\\\])$")
_MAX_LINE = 2000  # characters of a statement without \boxed that are read
_PERCENT = re.compile(r"\s*\\?%$")
_SCIENTIFIC = re.compile(r"([-+]?[0-9]+)(?:\.([0-9]+))?[eE]([-+]?[0-9]{1,2})")
_GROUPED = re.compile(r"[0-9]{1,3}(?:(?:\s|\\[,;: ])[0-9]{3})+(?![0-9])")
_SEPARATE = re.compile(r"[0-9]\s+[0-9]")
_ASSIGNMENT = re.compile(r"(?<![<>!\\=])=(?!=)")
_BRACKET = re.compile(r"(?:\\left)?\s*(\\\{|\(|\[)")
# Values of the symbols where expressions are compared first
_POINTS = (sympy.Rational(7, 5), sympy.Rational(9, 4))
_STEP = sympy.Rational(3, 11)
_TOLERANCE = 1e-5
_MAX_MAGNITUDE = 1e300


class MathVerifier(Verifier):
    r"""Rewards 1 if the final answer has the reference's value, and 0 otherwise.

    The final answer is in the last `\boxed{}`; without one, behind the last "answer is" or `####`;
    without these, in the last line. A reference that the library cannot read is compared as text.
    """

    def __init__(self) -> None:
        super().__init__()
        # This fails where the library is broken, and fills tables that the workers then share
        if not _is_equal(r"\frac{1}{2}", "0.5") or _is_equal("(x+1)^2", "(1, 2]"):
            raise RuntimeError("math-verify compares wrongly. Install the pinned version")

    def check_answer(self, question: Question) -> None:
        """Raise ValueError for a reference without an answer or beyond the limits of answers."""
        reference = _reference(question.answer)
        if not reference:
            problem = "holds no answer"
        elif not is_within_limits(reference, reference):
            problem = "is longer, deeper or larger than math allows"
        else:
            return
        raise ValueError(
            f"the reference answer {question.answer[:80]!r} {problem}. Correct or remove the row"
        )

    def grade(self, prompt: Prompt, text: str) -> Verdict:
        """Compare the final answer of a response with the reference."""
        answer = final_answer(text)
        is_correct = answer is not None and _is_equal(_reference(prompt.answer), answer)
        return Verdict(reward=float(is_correct), correctness=float(is_correct), answer=answer)


def final_answer(text: str) -> str | None:
    r"""Return the final answer in a response, None if there is none.

    It is a formula where one stands, else a number if one ends the statement, else the statement.
    """
    if "\\boxed{" in text:
        return last_boxed(text)
    line = _statement(text)
    if not line or len(line) > _MAX_LINE:
        return None
    formulas = _FORMULA.findall(line)
    if formulas:
        return "".join(formulas[-1]).strip() or None
    return last_number(line) or line.strip().strip("*").rstrip(".").strip() or None


def _statement(text: str) -> str | None:
    """Return the line behind the last marker, or the last line."""
    last = None
    for marker in _MARKER.finditer(text):
        last = marker
    return last_line(text) if last is None else text[last.end() :].lstrip().partition("\n")[0]


def _reference(text: str) -> str:
    """Return the reference answer, which may be bare or in a box."""
    return last_boxed(text) or text.strip()


def _is_equal(reference: str, answer: str) -> bool:
    """Return True if two answers are equal as texts or as values."""
    if canonical(reference) == canonical(answer):
        return True
    if not is_within_limits(answer, reference):
        return False
    reference, answer = (_DELIMITERS.sub("", text.strip()) for text in (reference, answer))
    if _differ_in_form(reference, answer):
        return False
    try:
        return _is_equal_value(_read(reference), _read(answer))
    except Exception:
        # The library fails for this pair, and will do so each time: a rule, not a missing verdict
        return False


def _differ_in_form(reference: str, answer: str) -> bool:
    r"""Return True for forms that math-verify takes for one.

    `\{1,2\}` and `(1,2)` are such forms, and `x=1,y=2` and `1,2`.
    """
    brackets = [_BRACKET.match(text) for text in (reference, answer)]
    if all(brackets) and len({bracket.group(1) == "\\{" for bracket in brackets if bracket}) == 2:
        return True
    if "," not in reference + answer and "and" not in reference + answer:
        return False
    counts = [len(_ASSIGNMENT.findall(text)) for text in (reference, answer)]
    return counts[0] != counts[1] and max(counts) > 1


@lru_cache(maxsize=64)
def _read(text: str) -> Expression:
    """Parse an answer. Raises what the library raises, and ValueError beyond the limits."""
    text = _GROUPED.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)
    if _SEPARATE.search(text):
        raise ValueError("the library adds numbers that stand side by side")
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific is not None:
        return sympy.Rational(text)
    number = _PERCENT.sub("", text)
    expression = parse_latex_cached(normalize_latex(number, _NORMALIZATION))
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):
        raise ValueError("the text is no expression")
    if not is_computable(expression):
        raise ValueError("its value is too large")
    return convert_to_pct(expression) if number != text else expression


def _is_equal_value(reference: Expression, answer: Expression) -> bool:
    # `1` is not `{1}`, but a relation such as `1<x<2` may be a set
    differ_in_kind = _is_collection(reference) != _is_collection(answer)
    if differ_in_kind and not _is_relation(reference) and not _is_relation(answer):
        return False
    if _is_relation(reference) and _is_relation(answer) and not is_solvable(answer, reference):
        return False
    if _differ_in_value(_right_side(reference, answer), _right_side(answer, reference)):
        return False
    # `math_verify.verify` without its clock, after which an answer would count as incorrect
    equality = sympy_expr_eq(reference, answer, float_rounding=6, numeric_precision=15)
    return bool(equality)


def _is_collection(expression: Expression) -> bool:
    return isinstance(expression, sympy.Set | sympy.Tuple)


def _is_relation(expression: Expression) -> bool:
    return isinstance(expression, sympy.logic.boolalg.Boolean) and not isinstance(
        expression, sympy.Symbol
    )


def _right_side(expression: Expression, other: Expression) -> Expression:
    """Return the right side of an equation that math-verify compares with a value."""
    is_compared = isinstance(expression, sympy.Eq) and not _is_relation(other)
    return expression.rhs if is_compared else expression


def _differ_in_value(reference: Expression, answer: Expression) -> bool:
    """Return True if two expressions have clearly different values at a point.

    Simplification, which takes long, then only sees expressions that are equal or nearly so.
    """
    for point in _POINTS:
        values = [_values(expression, point) for expression in (reference, answer)]
        first, second = values
        if first is None or second is None:
            return False
        if not (_contains(first, second) and _contains(second, first)):
            return True
    return False


def _contains(values: list[complex], others: list[complex]) -> bool:
    """Return True if each of the others is close to one of the values."""
    return all(
        any(abs(value - other) <= _TOLERANCE * max(1.0, abs(value)) for value in values)
        for other in others
    )


def _values(expression: Expression, point: sympy.Rational) -> list[complex] | None:
    """Return the values of a number, a term or a finite collection, None for anything else."""
    if isinstance(expression, sympy.FiniteSet | sympy.Tuple):
        parts = [_values(part, point) for part in expression.args]
        return None if None in parts else [value for part in parts if part for value in part]
    if not isinstance(expression, sympy.Expr) or isinstance(expression, sympy.Symbol):
        return None
    if expression.has(sympy.UnevaluatedExpr, sympy.core.function.AppliedUndef, sympy.MatrixExpr):
        return None
    # The value of a symbol depends on its name alone, so that `x` and `y` differ
    places = {symbol: point + _STEP * _place(symbol.name) for symbol in expression.free_symbols}
    try:
        value = complex(expression.evalf(15, subs=places))
    except (TypeError, ValueError, OverflowError):
        return None
    return [value] if abs(value) < _MAX_MAGNITUDE else None


def _place(name: str) -> int:
    return sum(position * ord(letter) for position, letter in enumerate(name, 1)) % 97
