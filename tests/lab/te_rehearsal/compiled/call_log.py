"""Answers calls of compiled functions, checks their arguments, and counts them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tests.lab.te_rehearsal.compiled.signatures import Signature, read_signature

Answer = Callable[..., Any]

# They read constants of the libraries and touch no device.
COMPILED = ("get_num_cublas_streams", "get_cudnn_version", "get_cublasLt_version")
_CALLERS = ("transformer_engine.", "megatron.")


class NotRehearsed(Exception):
    """A compiled function without a stand-in was called."""


class CallLog:
    """Stands between Python and the compiled extension of Transformer Engine.

    extension: the module `transformer_engine_torch`.
    stand_ins: functions of plain torch by the name that they answer for.
    counts_now: True where a GPU would make the calls. The others are answered, and not counted.

    Attributes:
    counts: the number of calls of each function.
    """

    def __init__(
        self, extension: Any, stand_ins: Mapping[str, Answer], counts_now: Callable[[], bool]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._counts_now = counts_now
        self.stand_ins = stand_ins
        self._originals = {
            name: value
            for name, value in vars(extension).items()
            if callable(value) and not isinstance(value, type) and not name.startswith("_")
        }
        unknown = set(stand_ins) - set(self._originals)
        if unknown:
            raise ValueError(f"the extension has no function {', '.join(sorted(unknown))}")
        classes = {name: kind for name, kind in vars(extension).items() if isinstance(kind, type)}
        self.signatures = {
            name: read_signature(function, classes) for name, function in self._originals.items()
        }
        answers = {id(function): self._answer(name) for name, function in self._originals.items()}
        for name, function in self._originals.items():
            setattr(extension, name, answers[id(function)])
        _replace_in_callers(self._originals, answers)

    @property
    def functions(self) -> list[str]:
        """The names of all compiled functions."""
        return sorted(self._originals)

    def kind(self, name: str) -> str:
        """Tell how calls of a function are answered: compiled, stand-in or none."""
        if name in COMPILED:
            return "compiled"
        return "stand-in" if name in self.stand_ins else "none"

    def _answer(self, name: str) -> Answer:
        signature: Signature = self.signatures[name]
        function = self.stand_ins.get(name)
        if name in COMPILED:
            function = self._originals[name]

        def answer(*args: Any, **options: Any) -> Any:
            self.counts[name] += self._counts_now()
            signature.check(args, options)
            if function is None:
                raise NotRehearsed(f"{name}: a compiled function without a stand-in was called")
            return function(*args, **options)

        answer.__name__ = name
        return answer


def _replace_in_callers(functions: Mapping[str, Any], answers: Mapping[int, Answer]) -> None:
    """Replace the functions in modules that imported them by name."""
    originals = {id(function) for function in functions.values()}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(_CALLERS):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                setattr(module, name, answers[id(value)])
