"""Types of numbers in messages."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
