"""The types of configuration values, and the base class of every section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict, StringConstraints

Positive = Annotated[int, Ge(1), Le(2**31 - 1)]
# The number of things that are all kept in memory.
Count = Annotated[int, Ge(1), Le(10**7)]
Whole = Annotated[int, Ge(0), Le(2**31 - 1)]
# Up to eleven days: the same time in milliseconds fits into 31 bits.
Seconds = Annotated[float, Gt(0), Le(10**6)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
OpenShare = Annotated[float, Gt(0), Lt(1)]
# The range of numpy's global generator, which Megatron seeds.
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]

_BOOLEANS = {"true": True, "false": False}
# pydantic refuses a boolean where text is expected. Booleans arrive as words.
_NotBoolean = BeforeValidator(
    lambda value: _BOOLEANS.get(value, value) if isinstance(value, str) else value
)
Text = Annotated[str, _NotBoolean]

# A user-defined class, such as my_package.my_module:MyScorer.
PLUGIN_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
# A plain directory name without "..".
NAME_PATTERN = r"^[A-Za-z0-9](?:[A-Za-z0-9_-]|\.[A-Za-z0-9_-])*\.?$"
# A port, or a host and a port.
ADDRESS_PATTERN = r"^(?:[A-Za-z0-9._-]+:|\[[0-9A-Fa-f:.]+\]:)?[0-9]{1,5}$"
PluginName = Annotated[str, StringConstraints(pattern=PLUGIN_PATTERN)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=128), _NotBoolean]
Address = Annotated[str, StringConstraints(pattern=ADDRESS_PATTERN), _NotBoolean]
Options = dict[str, Any]
# YAML reads a bare `off` as false.
Off = BeforeValidator(lambda value: "off" if value == "false" else value)
_OFF_WORDS = ("false", "off", "no", "none", "null", "disabled", "0")
# A key that null turns off: words that mean off are null, too.
OffIsNull = BeforeValidator(lambda value: None if str(value).lower() in _OFF_WORDS else value)
Dtype = Literal["float32", "bfloat16"]


class Section:
    """Base class of every section: a frozen dataclass that pydantic checks when Hydra's tree is
    read.

    Constructors of components take sections directly; a section built in Python is not checked.
    """

    __pydantic_config__ = ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )
