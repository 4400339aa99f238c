"""The texts of a stranger's folder as pages and terminals may show them: without secrets and control characters, in bounded time."""

import hashlib

from collectives.texts import may_have_secrets, shown, without_secrets

LONGEST = 100_000
"""Characters of a text. A longer one is told by its length, for a part of it may be a part of a secret."""
MOST_SEARCHED = 2_000_000
"""Characters of all texts of a file in which words stand that secrets have. To search so many takes less than a second."""
_SHORT, _MOST_KNOWN = 100, 10_000


class Readable:
    """What is shown for the texts of one file. The first MOST_SEARCHED characters are searched for secrets, so give the texts that
    matter most first. `lines`: line breaks stay. `most`: characters that are shown of a text. `searched`: in place of MOST_SEARCHED.
    """

    def __init__(self, *, lines: bool = False, most: int = LONGEST, searched: int = MOST_SEARCHED) -> None:
        self._lines, self._most = lines, most
        self.left = searched
        self._known: dict[str, str] = {}  # many events have the same short ones

    def __call__(self, text: str) -> str:
        """The text to be shown."""
        if (known := self._known.get(text)) is not None:
            return known
        found = self._found(text)
        if len(text) < _SHORT and len(self._known) < _MOST_KNOWN:
            self._known[text] = found
        return found

    def _found(self, text: str) -> str:
        if len(text) > LONGEST:
            return _told(text)
        visible = shown(text, lines=self._lines)
        if not may_have_secrets(visible):
            return visible[: self._most]
        self.left -= len(visible)
        return _told(text) if self.left < 0 else without_secrets(visible)[: self._most]

    def all(self, texts: list[str]) -> list[str]:
        """The texts of a list, such as the hosts of a hundred thousand ranks."""
        together = "".join(texts)
        is_plain = (
            together.isprintable() and not may_have_secrets(together) and max(map(len, texts), default=0) <= LONGEST
        )
        return texts if is_plain else list(map(self, texts))


def _told(text: str) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]  # two runs may be compared
    return f"(a text of {len(text):,} characters, sha256 {digest})"
