"""Prints constraints.txt with the versions that other files give instead: merge_constraints.py BASE
OVERRIDE...
"""

import re
import sys
from pathlib import Path


def merge(texts: list[str]) -> list[str]:
    """Lines such as `torch==2.13.0`, later texts before earlier ones, sorted by name.

    Comments are dropped.
    """
    chosen: dict[str, str] = {}
    for text in texts:
        for line in (line.strip() for line in text.splitlines()):
            if line and not line.startswith("#"):
                name = re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0]
                chosen[re.sub(r"[-_.]+", "-", name).lower()] = line
    return [chosen[name] for name in sorted(chosen)]


if __name__ == "__main__":
    print("\n".join(merge([Path(name).read_text() for name in sys.argv[1:]])))
