"""Engines that encode text faster than Hugging Face's library `tokenizers`: fastokens and gigatoken, if they are installed.

A run uses an engine that gives the tokens of `tokenizers` on a sample: scripts, spaces, code, the tokenizer's own special tokens, and
the first documents of the data.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ckpt.ranks import Ranks


Encode: TypeAlias = Callable[[bytes], np.ndarray]
"""The tokens of a text in UTF-8, without special tokens around them: int32."""

_CACHED_BYTES = 256 << 20
"""gigatoken keeps the tokens of every word that it has seen, 90 bytes for each: it starts anew after so many bytes of text."""


def _fastokens(json: str) -> Encode:
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # the ranks are parallel
    import fastokens

    encode = fastokens.Tokenizer.from_json_str(
        json
    ).encode_batch_flat  # twice as fast as `encode`, which returns a list
    return lambda text: np.frombuffer(encode([text.decode()])[0], "<i4").astype(np.int32, copy=False)


def _gigatoken(json: str) -> Encode:
    from gigatoken import Tokenizer

    made, num_bytes = Tokenizer.from_json(json), 0

    def encode(text: bytes) -> np.ndarray:
        nonlocal made, num_bytes
        num_bytes += len(text)
        if num_bytes > _CACHED_BYTES:
            made, num_bytes = Tokenizer.from_json(json), len(text)
        tokens: np.ndarray = made.encode(text)
        return tokens.astype(np.int32)

    return encode


ENGINES: Mapping[str, Callable[[str], Encode]] = {"fastokens": _fastokens, "gigatoken": _gigatoken}
"""How an engine is made of the text of a tokenizer.json. The first one that fits is used: the memory of fastokens has a limit."""


class EngineChoice(NamedTuple):
    """The encoding of a run, lines about the engines for the user, and the name of the engine that was chosen, if one was."""

    encode: Encode
    lines: list[str]
    engine: str | None = None


def choose(
    json: str,
    reference: Encode,
    special: Iterable[str],
    comm: "Ranks",
    texts: Callable[[], Iterable[bytes]] = tuple,
    engines: Mapping[str, Callable[[str], Encode]] | None = None,
) -> EngineChoice:
    """The first engine that is installed on all ranks, and gives the tokens of `reference` on a sample; else `reference`.

    Collective: all ranks choose the same one. An error of `texts` is raised on all ranks.

    Args:
        json: the text of a tokenizer.json.
        reference: the encoding of Hugging Face's library.
        special: the tokenizer's special tokens.
        comm: the ranks that encode.
        texts: reads the first texts of the data; rank 0 calls it if it has an engine.
        engines: the engines to choose from; default: ENGINES.
    """
    lines: list[str] = []
    sample: list[bytes] = []
    for name, make in (ENGINES if engines is None else engines).items():
        encode, problem = _made(make, json)
        with comm.together():
            if encode is not None and not sample:
                sample = [*_sample(special), *(texts() if comm.rank == 0 else ())]
        if encode is not None:
            problem = _difference(encode, reference, sample)
        ranks = comm.all_gather_object((encode is not None, problem))
        num_having = sum(has_it for has_it, _ in ranks)
        problems = [their_problem for _, their_problem in ranks if their_problem]
        if encode is not None and num_having == comm.size and not problems:
            lines.append(f"tokenizer: {name} encodes the documents")
            return EngineChoice(_or_reference(encode, reference), lines, name)
        if problems:
            lines.append(f"tokenizer: {name} is left out: {problems[0]}")
        elif num_having:
            lines.append(f"tokenizer: {name} is left out: {num_having} of {comm.size} ranks have it; expected all")
    return EngineChoice(reference, lines)


def encode_by(engine: str, json: str, reference: Encode) -> Encode:
    """The encoding of the engine that another process of this rank has chosen."""
    return _or_reference(ENGINES[engine](json), reference)


def _made(make: Callable[[str], Encode], json: str) -> tuple[Encode | None, str]:
    """An engine, or None and what is wrong with it: "" if it is not installed."""
    try:
        return make(json), ""
    except ImportError:
        return None, ""
    except BaseException as error:
        return None, f"it cannot use this tokenizer: {_reason(error)}"


def _difference(encode: Encode, reference: Encode, sample: Sequence[bytes]) -> str:
    """What is wrong with the tokens of an engine, or ""."""
    for text in sample:
        try:
            tokens = encode(text)
        except BaseException as error:
            return f"it cannot encode a sample: {_reason(error)}"
        if not np.array_equal(tokens, reference(text)):
            return f"its tokens differ from those of the library tokenizers in {text.decode()[:40]!r}"
    return ""


def _reason(error: BaseException) -> str:
    """An error of an engine in a line. It may be one of Rust's panics, which are no Exception. A request to end is raised."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return (str(error).splitlines() or [type(error).__name__])[0]


def _or_reference(encode: Encode, reference: Encode) -> Encode:
    """The encoding of an engine; the reference encodes what the engine refuses, such as a text that is too hard for its matcher."""

    def encoded(text: bytes) -> np.ndarray:
        try:
            return encode(text)
        except BaseException as error:  # such as one of Rust's panics
            _reason(error)
            return reference(text)

    return encoded


def _sample(special: Iterable[str]) -> list[bytes]:
    """Texts on which engines may differ."""
    words = (
        "The quick brown fox's 12345678 jumps weren't over 3.14159e-10 lazy dogs; it'll cost $1,000.00 (or €900)!",
        "Größe, naïve, Ærøskøbing, İstanbul, ﬁn, ǅ, e\u0301 and \u00e9, A\u0308\u0323 and \u1e05\u0308",
        "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Հայոց գրեր",
        "敏捷的棕色狐狸跳过了懒狗。いろはにほへと ちりぬるを カタカナ 키스의 고유조건은 입술끼리 만나야 하고 ①②③ ４５６ 十二",
        "نص حكيم له سر قاطع ١٢٣ דג סקרן שט בים ऋषियों को सताने वाले १२३ เป็นมนุษย์สุดประเสริฐ မြန်မာ ქართული አማርኛ",
        "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ☃️ ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ \U0001d504\U0001d4d0 \U0002070e \ue000 \uffff \U0010ffff",
        "a  b   c\td\t\te\n\nf\r\ng\n \n  h \u00a0i\u2003j\u200bk\u2028l\u0085m\u3000n\ufeffo\x00p\x07q\x7fr   ",
        "def f(x: int=0):\n    return [y**2 for y in range(x) if y%2 != 0]  # ok\n\n\tif(a&&b||!c){d->e++;}\n<a href='/?q=%20'>",
        "https://example.org/a_b-c/d?e=f&g=%C3%A9#h user@example.com C:\\a\\b 0xDEADBEEF 1_000_000 camelCaseABCDef __init__ I'M",
    )  # fmt: skip
    every = "".join(map(chr, [*range(0x250), *range(0x250, 0xD800, 13), *range(0xE000, 0x30000, 97)]))
    names = list(special)[:64]
    around = "".join(f"{name}a{name} b {name}\n{name}{name[:-1]} {name.upper()}" for name in names)
    long = " ".join(words) * 8 + "a" * 3000 + " " * 3000 + "0" * 999 + "\n" * 99 + "é" * 999 + "ab1!" * 500
    spaces = ("", " ", "\n", "  x", " \n x", "'", "'s", "x" * 17)
    texts = (*words, *spaces, " ".join(every), every, around, long)
    return [*(text.encode() for text in texts), Path(__file__).read_bytes()]
