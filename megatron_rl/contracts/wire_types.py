"""Numbers that messages may hold."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
