"""`python -m benchmarks NAME`: the same as the commands of `python -m mpitrain` that are named below."""

import sys

from mpitrain.cli import main

WORDS = {
    "chaos": ["chaos"],
    "data": ["bench", "data"],
    "monitoring": ["bench", "monitoring"],
    "published": ["plan", "--published"],
    "recovery": ["bench", "recovery"],
}
"""The words of `python -m mpitrain` for each benchmark."""

if __name__ == "__main__":
    name, *words = sys.argv[1:] or [""]
    if name not in WORDS:
        raise SystemExit(f"usage: python -m benchmarks {{{','.join(WORDS)}}} [options]; NAME --help shows the options")
    raise SystemExit(main([*WORDS[name], *words]))
