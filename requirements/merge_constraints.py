"""Print constraints.txt with the versions of other files in place of its own.

Usage: merge_constraints.py BASE OVERRIDE...
"""

import re
import sys
from pathlib import Path


def merge(texts: list[str]) -> list[str]:
    """Merge lines such as `torch==2.13.0`, sorted by name. Later texts replace earlier ones.

    Comments are dropped.
    """
    lines_by_name: dict[str, str] = {}
    for text in texts:
        for line in map(str.strip, text.splitlines()):
            if line and not line.startswith("#"):
                name = re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0]
                lines_by_name[re.sub(r"[-_.]+", "-", name).lower()] = line
    return [lines_by_name[name] for name in sorted(lines_by_name)]


if __name__ == "__main__":
    print("\n".join(merge([Path(name).read_text() for name in sys.argv[1:]])))
