"""The pages as a reader takes them: each block of code, in order, and each command in it."""

import re
from dataclasses import dataclass

from launching import ROOT
from markdown_it import MarkdownIt


@dataclass(frozen=True)
class Block:
    """A block of code of a page: a fenced one, or one that is indented.

    Its kind is "commands", "session" (commands after "$ ", with their outputs), "prompt" (Python after ">>> "), "python", "script", or
    the language that the page names, else "text".
    """

    page: str  # below ROOT
    line: int
    kind: str
    text: str

    @property
    def key(self) -> str:
        """By how this begins, table.py names it."""
        return f"{self.page}: {self.text}"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a shell, as it stands on the page."""

    page: str
    line: int
    text: str  # of several lines if they end in a backslash
    shown: tuple[str, ...]  # what the page shows of its output

    @property
    def key(self) -> str:
        """By how this begins, table.py names it."""
        return f"{self.page}: {self.text}"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README first, then the pages in the order of docs/README.md, which has them all."""
    listed = re.findall(r"\]\(([\w./-]+\.md)\)", (ROOT / "docs/README.md").read_text())
    paths = [(ROOT / "docs" / name).resolve().relative_to(ROOT).as_posix() for name in listed]
    return list(dict.fromkeys([*paths, "docs/README.md"]))


def blocks(page: str) -> list[Block]:
    found = []
    for token in MarkdownIt().parse((ROOT / page).read_text()):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            line = token.map[0] + (2 if token.type == "fence" else 1)  # of the first line of code, from 1
            found.append(Block(page, line, kind_of(token.type, token.info, token.content), token.content))
    return found


def kind_of(token: str, info: str, text: str) -> str:
    if text.startswith(">>> "):
        return "prompt"
    if info == "python":
        return "python"
    if info in ("bash", "sh") or text.startswith("#!"):
        return "script" if text.startswith("#!") else "commands"
    if token == "code_block":
        return "commands"
    return "session" if text.startswith("$ ") else info or "text"


def commands(block: Block) -> list[Command]:
    """The commands of a block: its lines, those joined that end in a backslash. Comments are none."""
    found: list[tuple[int, str, list[str]]] = []
    is_open = False
    for line, text in enumerate(block.text.splitlines(), block.line):
        if is_open:
            found[-1] = (found[-1][0], found[-1][1] + "\n" + text, found[-1][2])
        elif block.kind == "session" and not text.startswith("$ "):
            found[-1][2].append(text)
            continue
        elif text.strip() and not text.startswith("#"):
            found.append((line, text.removeprefix("$ "), []))
        is_open = text.endswith("\\")
    return [Command(block.page, line, text, tuple(shown)) for line, text, shown in found]


BLOCKS = [block for page in pages() for block in blocks(page)]
