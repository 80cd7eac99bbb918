"""What keys are made of: numbers with limits, names, and the base of every section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict, StringConstraints

Positive = Annotated[int, Ge(1), Le(2**31 - 1)]
Count = Annotated[int, Ge(1), Le(10**7)]  # of what is kept in memory, one by one
Whole = Annotated[int, Ge(0), Le(2**31 - 1)]
Seconds = Annotated[float, Gt(0), Le(10**6)]  # eleven days; milliseconds of it fit into 31 bits
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
OpenShare = Annotated[float, Gt(0), Lt(1)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]  # of numpy's global generator, which Megatron seeds

# A user's own class, such as my_package.my_module:MyScorer, and a plain directory name without
# "..".
DOOR = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
NAME = r"^[A-Za-z0-9](?:[A-Za-z0-9_-]|\.[A-Za-z0-9_-])*\.?$"
PluginName = Annotated[str, StringConstraints(pattern=DOOR)]
Name = Annotated[str, StringConstraints(pattern=NAME, max_length=128)]
Options = dict[str, Any]
Off = BeforeValidator(
    lambda value: "off" if value == "false" else value
)  # what YAML makes of a bare off
Dtype = Literal["float32", "bfloat16"]


class Section:
    """Base of every section: a frozen dataclass that constructors take, checked by pydantic where
    it is composed.
    """

    __pydantic_config__ = ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )
