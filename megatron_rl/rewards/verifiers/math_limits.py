r"""Limits of mathematical answers, which a verifier checks before it computes.

An answer beyond a limit is incorrect by rule, so that the verdict repeats. A clock does not repeat,
and its end is no verdict: a policy could escape a negative advantage by slow answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import sympy

_MAX_CHARACTERS = 1000
_MAX_DEPTH = 6  # of brackets: the time of the parser grows exponentially with it
_MAX_DIGITS = 100  # of a number as written
_MAX_EXPONENT_DIGITS = 5  # in an exponent, together
_MAX_VALUE_DIGITS = 5000  # of a number that an expression has as its value
_MAX_NODES = 300
_MAX_SYMBOLIC_EXPONENT = 50
_MAX_FACTORIAL = 1000

_OPENING = re.compile(r"\\[\\$%]|[{(\[]|[})\]]")
_DIGITS = re.compile(r"[0-9]+")
_EXPONENT = re.compile(r"\^\s*(?=(\{?))")
# Numbers of binomials and of the gamma function, which the parser computes at once
_EAGER = re.compile(r"binom|[Gg]amma\s*[({\\]|\\choose")
_LONG_NUMBER = re.compile(r"[0-9]{4}")
# Commands that leave the work to the verifier: an answer should be its result
_WORK = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim|det|gcd|lcm|max|min|operatorname|[bp]?mod|norm|partial|Vert"
    r"|xrightarrow|overset|limits)(?![A-Za-z])|\\\||\\frac\s*\{?\s*d\s*\}?\s*\{\s*d"
)


def is_within_limits(answer: str, reference: str) -> bool:
    """Return True if a parser may read an answer.

    It is short, has few nested brackets, short numbers and small exponents. It leaves no work, such
    as an integral, unless the reference does, too.
    """
    return (
        len(answer) <= _MAX_CHARACTERS
        and _depth(answer) <= _MAX_DEPTH
        and all(len(digits) <= _MAX_DIGITS for digits in _DIGITS.findall(answer))
        and _has_small_exponents(answer)
        and not (_EAGER.search(answer) and _LONG_NUMBER.search(answer))
        and set(_WORK.findall(answer)) <= set(_WORK.findall(reference))
    )


def _depth(text: str) -> int:
    """Return how deep brackets are nested. `|` counts too, because pairs of it may be nested."""
    depth = deepest = 0
    for match in _OPENING.finditer(text):
        bracket = match.group()
        depth += 1 if bracket in "{([" else -1 if bracket in "})]" else 0
        deepest = max(deepest, depth)
    return max(deepest, text.count("|") // 2)


def _has_small_exponents(text: str) -> bool:
    """Return True if exponents have few digits, and exponents of exponents have no numbers."""
    for match in _EXPONENT.finditer(text):
        exponent = _group(text, match.end()) if match.group(1) else text[match.end() :][:1]
        num_digits = sum(character.isdigit() for character in exponent)
        if num_digits > (2 if "^" in exponent else _MAX_EXPONENT_DIGITS) or "!" in exponent:
            return False
    return True


def _group(text: str, start: int) -> str:
    """Return the group in braces that begins at a position, to the end if it is not closed."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]


def is_computable(expression: sympy.Basic | sympy.MatrixBase) -> bool:
    """Return True if an expression is small, and its numbers stay small when they are computed."""
    for count, node in enumerate(sympy.preorder_traversal(expression)):
        if count > _MAX_NODES or _is_large_power(node):
            return False
    return _digits(expression) <= _MAX_VALUE_DIGITS


def is_solvable(answer: sympy.Basic, reference: sympy.Basic) -> bool:
    """Return True if a relation is hardly larger than the reference, so that solving it ends."""
    size = _size_of_relation(answer)
    other = _size_of_relation(reference)
    return (
        size[0] <= max(2 * other[0], 40)
        and size[1] <= max(other[1], 3)
        and answer.free_symbols <= reference.free_symbols
        and answer.atoms(sympy.Function) <= reference.atoms(sympy.Function)
    )


def _size_of_relation(relation: sympy.Basic) -> tuple[int, int]:
    """Return the number of nodes, and the largest exponent."""
    nodes = list(sympy.preorder_traversal(relation))
    exponents = [abs(node.exp) for node in nodes if isinstance(node, sympy.Pow)]
    return len(nodes), max((int(e) for e in exponents if e.is_Integer), default=1)


def _is_large_power(node: object) -> bool:
    """Return True for a power that would be expanded to very many terms."""
    return (
        isinstance(node, sympy.Pow)
        and bool(node.base.free_symbols)
        and node.exp.is_Integer
        and abs(int(node.exp)) > _MAX_SYMBOLIC_EXPONENT
    )


def _digits(node: object) -> float:
    """Return an upper bound for the number of digits of an expression's value.

    Symbols count as one digit. Infinity if it exceeds every limit.
    """
    if isinstance(node, sympy.Rational):
        return max(_log10(node.p), _log10(node.q), 1.0)
    if isinstance(node, sympy.Float):
        return max(abs(float(sympy.log(abs(node), 10))), 1.0) if node else 1.0
    if isinstance(node, sympy.MatrixBase):
        return sum((_digits(entry) for entry in node.flat()), 1.0)
    if not isinstance(node, sympy.Basic) or not node.args:
        return 1.0
    bound = _BOUNDS.get(node.func)
    digits = [_digits(argument) for argument in node.args]
    if max(digits) == math.inf:
        return math.inf
    return bound(node, digits) if bound is not None else max(digits)


def _log10(number: int) -> float:
    return abs(number).bit_length() * math.log10(2)


def _value(node: sympy.Basic, digits: float) -> float:
    """Return an upper bound for the magnitude of an expression."""
    if isinstance(node, sympy.Rational):
        return abs(node.p) // node.q + 1
    return math.inf if digits > 2 * math.log10(_MAX_VALUE_DIGITS) else 10**digits


def _bound_of_power(node: sympy.Basic, digits: list[float]) -> float:
    return digits[0] * max(_value(node.args[1], digits[1]), 1)


def _bound_of_exponential(node: sympy.Basic, digits: list[float]) -> float:
    return max(_value(node.args[0], digits[0]), 1)


def _bound_of_factorial(node: sympy.Basic, digits: list[float]) -> float:
    value = _value(node.args[0], digits[0])
    return math.inf if value > _MAX_FACTORIAL else value * 3


_BOUNDS: dict[type, Callable[[sympy.Basic, list[float]], float]] = {
    sympy.Add: lambda node, digits: max(digits) + len(digits),
    sympy.Mul: lambda node, digits: sum(digits),
    sympy.Pow: _bound_of_power,
    sympy.exp: _bound_of_exponential,
    sympy.factorial: _bound_of_factorial,
}
