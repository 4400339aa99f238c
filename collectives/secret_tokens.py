"""Secrets that are known by their own form: a table, each row with a text that has one and texts that look alike and have none.

A form is a pattern whose group `secret` is hidden. Tokens are known by their first letters, and names of files, data sets and runs may
begin with the same ones, so their forms ask for more: lengths, or characters that are drawn and make no words. Each pattern takes a
time in proportion to the text, whatever the text is.

Pure, of the standard library alone: see `texts.py`.
"""

import re
from collections.abc import Callable
from typing import NamedTuple


def _is_drawn(text: str) -> bool:
    """Whether less than 70 % of the letters are in words, such as Qwen2TokenizerFast has. Words have vowels. None is longer
    than 20 letters, or begins like the alphabet or xxx, as tokens of examples do."""
    in_words = sum(len(found[0]) for found in _WORDS.finditer(text))
    return in_words < 0.7 * sum(map(str.isalpha, text))


_WORDS = re.compile(
    r"(?!.?abcde|.?([a-z])\1\1)(?=[A-Za-z][a-z]{0,18}[aeiouy]|[AEIOUY])(?:[A-Z][a-z]{2,19}|(?<![A-Za-z])[a-z]{4,20})(?![a-z])"
)


def _has_drawn(text: str) -> bool:
    """Whether it has 20 letters and digits in parts that are drawn, of all kinds. - and _ may be drawn too, and stand between words
    in names."""
    parts = [
        part for part in re.findall("[A-Za-z0-9]{8,}", text) if re.search("[A-Z]", part) and re.search("[a-z]", part)
    ]
    drawn = "".join(filter(_is_drawn, parts))
    return len(drawn) >= 20 and bool(re.search(r"\d", drawn))


def _is_of_hub(text: str) -> bool:
    """Of Hugging Face: 34 letters, often without digits, that are no words."""
    return _has_drawn(text) or (len(text) == len("hf_") + 34 and not _CAMEL.fullmatch(text, 3))


_CAMEL = re.compile(r"(?:[A-Z]{0,2}[a-z]{2,14}\d{0,8})(?:[A-Z]{1,2}[a-z]{2,14}\d{0,8})+")


def _is_of_github(text: str) -> bool:
    return _has_drawn(text) or (len(text) == len("ghp_") + 36 and has_all_kinds(text[4:]))


def _is_of_gitlab(text: str) -> bool:
    """It has 20 characters, or 27 and then its length and a sum for a check."""
    return _has_drawn(text) or ((len(text) == len("glpat-") + 20 or "." in text) and _is_drawn(text[6:]))


def _is_of_aws(text: str) -> bool:
    """It is not ASIA and words in capital letters, with a number at the end or none. Words have vowels, and few rare letters."""
    found = re.fullmatch(r"ASIA([A-Z]+)\d*", text)
    return not found or bool(
        re.search("[^AEIOUY]{5}|Q[^U]", found[1])
        or len(re.findall("[AEIOUY]", found[1])) < 0.24 * len(found[1])
        or len(re.findall("[JKQVWXZ]", found[1])) > 0.2 * len(found[1])
    )


def _is_of_slack(text: str) -> bool:
    """It has the numbers of a team and a bot, or is drawn."""
    return _has_drawn(text) or bool(re.match(r"[a-z.]+-(?:\d-)?\d{9,}-", text))


def has_all_kinds(text: str) -> bool:
    """Whether a digit is among the letters, and the letters are drawn."""
    return bool(re.search(r"\d", text)) and _is_drawn(text)


class Form(NamedTuple):
    """A form of secrets. `stay`: texts without a secret."""

    name: str
    words: str
    """In small letters; a text without any of them is not searched, which is faster."""
    pattern: str
    hidden: str
    """The secret has S3CRET01, 0123cdef or 0123456789abcdef in it."""
    stay: tuple[str, ...]
    check: Callable[[str], bool] | None = None
    """Whether what is found as a secret is one."""


_A, _W = r"(?<![A-Za-z0-9])", r"(?<![\w-])"  # no letters before, and none that may be of a token
_END, _END_W = r"(?![A-Za-z0-9])", r"(?![\w-])"
TOKENS = (
    Form(
        "Hugging Face",
        "hf_",
        rf"{_A}(?P<secret>hf_[A-Za-z0-9]{{20,}})",
        "hf_S3CRET01abcdefghijklmnopqrstuvwxyz",
        (
            "hf_transformers",
            "/models/hf_Qwen2TokenizerFastVersion1/tokenizer.json",
            "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1",
        ),
        _is_of_hub,
    ),
    Form(
        "OpenAI, Anthropic",
        "sk-",
        rf"{_W}(?P<secret>sk-[\w-]{{20,}})",
        "sk-proj-S3CRET01abcdefghijklmnopqrstuvw",
        (
            "data/sk-wiki_dump_20240101_clean_00.jsonl",
            "/runs/sk-learn_classification_dataset_v2",
            "sk-Qwen2TokenizerFastVersion1Large",
            "s3://b/en-sk-opus_corpora_train_dataset_v1/0.jsonl",
        ),
        _has_drawn,
    ),
    Form(
        "DeepSeek and others",
        "sk-",
        r"(?<![\w./-])(?P<secret>sk-(?:or-v1-)?(?=(?:[a-z]{0,30}\d){6})[a-z0-9]{32,64})(?![\w/-]|\.\w)",
        "key sk-0123456789abcdef0123456789abcdef.",
        ("/x/sk-0123456789abcdef0123456789abcdef/a", "sk-0123456789abcdef0123456789abcdef.tar"),
    ),
    Form(
        "AWS",
        "akia asia",
        rf"{_A}(?P<secret>(?:AKIA|ASIA)[A-Z0-9]{{16}}){_END}",
        "AKIAS3CRET01ABCDEFGH",
        ("ASIACONFERENCESERIES", "ASIA_PACIFIC", "s3://b/ASIATESTDATAVERSION1/x", "ASIAINSTRUCT20240101"),
        _is_of_aws,
    ),
    Form(
        "Google",
        "aiza",
        rf"{_W}(?P<secret>AIzaSy[\w-]{{33}}){_END_W}",
        "AIzaSyS3CRET01-abcdefghijklmnopqrstuvwx",
        ("AIzawa_train_dataset_of_2024_and_its_x1",),
    ),
    Form(
        "Google",
        "ya29.",
        rf"{_W}(?P<secret>ya29\.[\w-]{{20,}})",
        "ya29.a0S3CRET01abcdefghijklmnopqrstuvwxyz",
        ("ya29.train_dataset_of_version_2",),
        _has_drawn,
    ),
    Form(
        "GitHub",
        "ghp_ gho_ ghu_ ghs_ ghr_",
        rf"{_A}(?P<secret>gh[pousr]_[A-Za-z0-9]{{30,}})",
        "ghp_S3CRET01abcdefghijklmnopqrstuvwxyz1234",
        ("ghs_GreenhouseGasSamplesOfEuropeVersion2", "gho_0123456789abcdef0123456789abcdef01234567"),
        _is_of_github,
    ),
    Form(
        "GitHub",
        "github_pat_",
        rf"{_A}(?P<secret>github_pat_\w{{40,}})",
        "github_pat_11S3CRET01aBcDeFgHiJkL_abcdefghijklmnopqr",
        ("github_pat_pull_requests_attributes_dataset_2024_v1",),
        _has_drawn,
    ),
    Form(
        "GitLab",
        "glpat-",
        rf"{_W}(?P<secret>glpat-[\w-]{{20,}}(?:\.[0-9a-z]{{2}}\.[0-9a-z]{{9}}{_END})?)",
        "glpat-S3CRET01-aBcDeFgHijK",
        ("glpat-license_plates_dataset_v1",),
        _is_of_gitlab,
    ),
    Form(
        "Slack",
        "xox",
        rf"{_W}(?P<secret>xox[a-z](?:\.xox[a-z])?-\d[\w-]{{15,}})",
        "xoxb-123456789012-1234567890123-S3CRET01",
        ("xoxb", "/data/xoxb-run-2024-01", "xoxb-2024-01-classification"),
        _is_of_slack,
    ),
    Form(
        "JSON web tokens",
        "eyj",
        rf"{_W}(?P<secret>eyJ[\w-]{{8,}}\.eyJ[\w-]{{8,}}\.[\w-]+)",
        "eyJhbGciOiJI.eyJS3CRET01.S3CRET01",
        ("eyJ.eyJ.a",),
    ),
    Form(
        "npm",
        "npm_",
        rf"{_A}(?P<secret>npm_[A-Za-z0-9]{{36}}){_END}",
        "npm_S3CRET01abcdefghijklmnopqrstuvwxyz12",
        ("npm_PackagesOfAllNodeVersionsTrainDataA1",),
        has_all_kinds,
    ),
    Form(
        "PyPI",
        "pypi-age",
        rf"{_A}(?P<secret>pypi-AgE[\w-]{{30,}})",
        "pypi-AgEIcHlwaS5vcmcS3CRET01abcdefghijklmnopqrs",
        ("pypi-simple_repository_mirror_of_all_packages_2024",),
    ),
    Form(
        "DigitalOcean",
        "dop_v1_",
        rf"{_A}(?P<secret>dop_v1_[0-9a-f]{{64}}){_END}",
        "dop_v1_" + 8 * "0123cdef",
        ("dop_v1_0123456789abcdef0123456789abcdef01234567",),
    ),
    Form(
        "W&B",
        "wandb_v1_",
        rf"{_A}(?P<secret>wandb_v1_\w{{20,}})",
        "wandb_v1_S3CRET01abcdefghijklmnopqrstuvwxyz",
        ("wandb_v1_export_of_all_runs_dataset_2024",),
        _has_drawn,
    ),
)
