"""Answers that take long, much memory or other liberties when they are read as mathematics."""

from __future__ import annotations

from tests.support.hostile.cases import HostileCases, make_prompt

_TOWER = "9" + "^{9" * 8 + "}" * 8
_NESTED = r"\frac{1}{1+" * 60 + "x" + "}" * 60
_RADICALS = r"\sqrt{2+" * 5 + "3" + "}" * 5

_ANSWERS = (
    # Sizes
    "9" * 3_000_000,
    "0." + "3" * 2_000_000,
    " " * 1_000_000,
    "1" + " " * 1_000_000 + "2",
    "1," * 300_000 + "1",
    "x+" * 200_000 + "x",
    r"\frac{1}{2}" * 50_000,
    "-" * 500_000 + "1",
    "a" * 2_000_000,
    "1 2 " * 200,
    # Depths
    "{" * 5000 + "x" + "}" * 5000,
    "(" * 5000 + "x" + ")" * 5000,
    "(" * 900 + "1",
    r"\left(" * 100 + "1" + r"\right)" * 100,
    "|" * 500 + "x" + "|" * 500,
    _NESTED,
    _RADICALS,
    r"\sqrt{" * 200 + "2" + "}" * 200,
    r"x^{" * 200 + "2" + "}" * 200,
    "[" * 300 + "]" * 300,
    # Values
    _TOWER,
    "9^9^9^9^9^9",
    "2^{10^{9}}",
    "2^{1000000000}",
    "(((9^{9999})^{9999})^{9999})^{9999}",
    "2^{99999}^{99999}",
    r"10^{10^{10}} \cdot 10^{-10^{10}}",
    "1e99999999",
    "1e99",
    "1000000!",
    "99999!!!!",
    "((((9!)!)!)!)!",
    r"\binom{100000}{50000}",
    r"\binom{1000}{500}^{999}",
    r"\Gamma(10000000)",
    r"\gamma{(99999999)}",
    r"\frac{99999^{9999}}{99998^{9999}}",
    r"\sqrt[99999]{99999^{99999}}",
    r"\log_{2}{2^{99999}}",
    r"\sin(10^{99999})",
    r"e^{e^{e^{e^{9}}}}",
    r"(1, 10^{10^{10}})",
    r"9^{9^{9}},9^{9^{9}}",
    "y=9^{9^{9^{9}}}",
    # Work that an answer leaves to its reader
    r"\int_0^1 x^{100} e^{-x^2} \sin(x) dx",
    r"\sum_{n=1}^{1000000000} \frac{1}{n^2}",
    r"\prod_{n=1}^{99999999} n",
    r"\lim_{x \to 0} \frac{\sin(\sin(\sin x)) - x}{x^9}",
    r"\gcd(123456789123456789, 987654321987654321)",
    r"\operatorname{eye}(100000)",
    r"\operatorname{zeros}(10000, 10000)",
    r"\det\begin{pmatrix}" + "&".join("abcdefg") + r"\end{pmatrix}",
    r"\frac{d}{dx} x^{x^{x}}",
    # Algebra that grows
    "(x+1)^{999}",
    "(a+b+c+d+e+f+g+h)^{50}",
    r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11})^{50}",
    r"\frac{(x^2+1)(x+1)^{49}}{2(x+1)^{49}}",
    r"\frac{x^2+\sin^{40}(x)+1-\sin^{40}(x)}{2}",
    r"\frac{x^2+1}{2}+\sqrt{x^{7}+x^{5}+1}-\sqrt{x^{7}+x^{5}+1.0000000001}",
    "x^{50}+y^{49}+z^{48}=w^{47}+v^{46}",
    "x^{7}+3x^{5}-x^{3}+11x=19",
    r"\sin(x)^{9}+\cos(y)^{9}=\tan(z)",
    r"\{" + ",".join(f"\\sqrt{{{n}}}" for n in range(2, 90)) + r"\}",
    r"\begin{pmatrix}" + r"\\".join("&".join("123456") for _ in range(30)) + r"\end{pmatrix}",
    # Code, other alphabets, and text that is no mathematics
    "__import__('os').system('touch escaped')",
    "open('escaped','w')",
    r"\input{/etc/passwd}",
    r"\text{__import__('os').system('touch escaped')}",
    r"\operatorname{exec}(1)",
    r"x_{__import__('os').system('touch escaped')}",
    "(lambda: 0)()",
    "\x00\x01\x02",
    "\u202e42\u202c",
    "四十二",
    "٤٢",
    "½",
    "42\u0336",
    "∞" * 500,
    r"\text{" * 3 + "42",
    "$" * 999,
    "\\" * 999,
    r"\frac" * 150,
    "=" * 500,
    "<" * 500,
    "%" * 500,
    "!" * 500,
    r"\pm" * 200 + "1",
    r"\boxed{\boxed{\boxed{42}}",
)

CASES = HostileCases(
    name="math",
    options={},
    prompts=[
        make_prompt(answer) for answer in ("42", r"\frac{x^2+1}{2}", "(1,2)", r"\{1, 2\}", "y=2x+1")
    ],
    responses=[rf"\boxed{{{answer}}}" for answer in _ANSWERS],
    ordinary=[r"\boxed{42.0}", r"\boxed{\frac12+\frac{x^2}{2}}", r"\boxed{(1,2)}", "Answer: 2, 1"],
)
