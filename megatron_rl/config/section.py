"""What the sections of the configuration have in common."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, StringConstraints


class Section:
    """Base of every section: a frozen dataclass that constructors take, checked by pydantic where it is composed."""

    __pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


Positive = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Seconds = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
OpenShare = Annotated[float, Gt(0), Lt(1)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]  # of numpy's global generator, which Megatron seeds

# A user's own class, such as my_package.my_module:MyScorer.
Door = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Options = dict[str, Any]
