"""What is a secret in a text: tokens of a known form, and what stands behind names such as AWS_SECRET_ACCESS_KEY: `hidden`.

The second kind is a table here, the first one is in `secret_tokens.py`. Each pattern takes a time in proportion to the text, whatever
the text is. Secrets in addresses are in `addresses.py`. Pure, of the standard library alone: see `texts.py`.
"""

import re
from collections.abc import Callable
from functools import partial

from collectives.secret_tokens import TOKENS, Form, has_all_kinds

HIDDEN = "***"
"""Stands for a secret."""
_B, _Q = r"[ \t]{0,4}", r"\\?[\"']"  # blanks, and a quote, which may be in a string itself
_VALUE = (
    rf"(?!(?:[bru]?{_Q})?(?:\*\*\*|(?:None|null|[Tt]rue|[Ff]alse)\b))(?:[bru]?(?P<quote>{_Q}))?"
    r"""(?P<secret>(?(quote)[^"'\\\n]+|[^\s"'&;,()\[\]{}\\]+))"""
)
_NAMES = (
    r"(?:passwd|password|passphrase|secret|credentials?|(?:api|secret|access|private|account|master|encryption|shared[_-]?access)[_-]?key"
    r"(?:[_-]?id)?|(?:api|auth|access|refresh|session|bearer|hf|hub|github)[_-]token|sharedaccesssignature|x-(?:amz|goog)-(?:signature|credential))"
)
_OF_SECRETS = (
    "ACCESS ACCOUNT ADMIN ANTHROPIC API AUTH AWS AZURE BEARER BOT COHERE COMET DATABASE DB DEPLOY DISCORD ENCRYPTION GCP "
    "GEMINI GH GITHUB GITLAB GOOGLE HF HUB HUGGINGFACE JENKINS MASTER MISTRAL MONGO MYSQL NEPTUNE NGC NPM OPENAI PG "
    "POSTGRES PRIVATE PYPI REDIS REFRESH REGISTRY ROOT SECRET SERVICE SESSION SIGNING SLACK SMTP SSH STORAGE TELEGRAM "
    "USER VAULT WANDB"
).replace(" ", "|")
"""Before _TOKEN, _KEY and others."""
_ENDS = "(?:TOKEN|KEY|PASS|PWD|PAT|JWT|WEBHOOK)"
_AFTER_VARIABLE = rf"(?:=|{_Q}{_B}[:=]{_B}|:[ ](?=[\"']|[A-Za-z_+/=-]{{0,200}}\d[\w+/=-]{{5}}))"
_WORD = r"(?!\*\*\*)(?P<secret>[^\s\"'\\]+)"
_HEADER = rf"(?:{_Q})?{_B}[:=]{_B}(?:{_Q})?"
_HOOKS = (
    r"hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/(?:file/)?bot|"
    r"\.webhook\.office\.com/"
)
NAMED = (
    Form(
        "settings",
        "passw passphrase secret credential key token sharedaccess x-amz x-goog",
        rf"(?i:{_NAMES}(?:{_B}={_B}|{_Q}{_B}[:=]{_B}|:{_B}(?=[\"']|[A-Za-z_+/=-]{{0,200}}\d[\w+/=-]{{5}}))){_VALUE}",
        "password: S3CRET01",
        ("password: expected one", "secret: 3 of 5", "the secret=None", "max_tokens=128"),
    ),
    Form(
        "variables of the environment",
        "_token _key _pa _pwd _jwt _webhook",
        rf"(?:{_OF_SECRETS})_{_ENDS}{_AFTER_VARIABLE}{_VALUE}",
        "WANDB_API_KEY=S3CRET01",
        ("HF_TOKEN: set it", "SORT_KEY=name", "EOT_TOKEN=<|endoftext|>", "IMAGE_TOKEN: <image>"),
    ),
    Form(
        "other variables with a value that is drawn",
        "_token _key _pa _pwd _jwt _webhook",
        rf"_{_ENDS}{_AFTER_VARIABLE}(?![\"']?[</.])"
        rf"(?=[\"']?[^\s\"']{{8}}){_VALUE}",
        "MY_JWT=S3CRET01",
        (
            "PRIMARY_KEY: id",
            "START_TOKEN=1",
            "OMP_STACK_PASS=3",
            "PARTITION_KEY=shard-00012",
            "EOT_TOKEN=<|reserved_200001|>",
            "SORT_KEY=created_at_2024",
        ),
        has_all_kinds,
    ),
    Form(
        "flags",
        "--",
        rf"(?i:(?<!-)--(?=\w)(?:(?:[\w.]|-(?!-)){{0,40}}?{_NAMES}|token)[= ]){_VALUE}",
        "--hf-token S3CRET01",
        ("--train.steps 3 --data.tokenizer x",),
    ),
    Form(
        "parameters of an address",
        "? &",
        rf"(?i:[?&][\w.-]{{0,40}}(?:signature|sig|token|credential|secret|password|key)=){_VALUE}",
        "GET /a.tar?X-Amz-Signature=S3CRET01&x=1",
        ("/a?part=1",),
    ),
    Form(
        "authorization",
        "authorization",
        rf"(?i:authorization{_HEADER})(?:(?i:bearer|basic|token|digest|negotiate|aws4-hmac-sha256)[ \t]{{1,4}}|"
        rf"(?=[^\s\"'\\]{{0,200}}\d)){_WORD}",
        "Authorization: Basic S3CRET01==",
        ("Authorization: expected a header",),
    ),
    Form(
        "bearer",
        "bearer",
        r"(?i:\bbearer[ \t]{1,4})(?=[\w.~+/=-]{0,200}\d)(?P<secret>[\w.~+/=-]{8,})",
        "Bearer S3CRET01",
        ("bearer of bad news",),
    ),
    Form(
        "headers",
        "x- cookie",
        rf"(?i:(?<![\w-])(?:x-[\w-]{{0,40}}(?:key|token)(?:{_Q})?{_B}:|(?:set-)?cookie(?:{_Q})?{_B}:"
        rf"(?={_B}(?:{_Q})?[\w.-]{{1,60}}=)){_B}(?:{_Q})?){_WORD}",
        "Cookie: session=S3CRET01",
        ("X-Ray: on", "a fortune cookie: eat it"),
    ),
    Form(
        "private keys",
        "-----begin",
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?P<secret>(?!\*\*\*)[^-]+)",
        "-----BEGIN RSA PRIVATE KEY-----\nS3CRET01\n-----END RSA PRIVATE KEY-----",
        ("-----BEGIN PUBLIC KEY-----\nx",),
    ),
    Form(
        "web hooks",
        "hooks. webhook telegram.",
        rf"(?i:{_HOOKS})(?!\*\*\*)(?P<secret>[^\s\"'`<>?#]+)",
        "https://hooks.slack.com/services/T0/B0/S3CRET01",
        ("https://slack.com/services",),
    ),
)
FORMS = TOKENS + NAMED
_COMPILED = [(frozenset(form.words.split()), re.compile(form.pattern), form.check) for form in FORMS]
_WORDS = tuple(dict.fromkeys(word for form in FORMS for word in form.words.split()))


def _words_in(text: str) -> list[str]:
    lower = text.lower()
    return [word for word in _WORDS if word in lower]  # twice as fast as to ask for the words of each form


def may_have(text: str) -> bool:
    """Whether `hidden` searches the text. If it does not search some texts together, it searches none of them."""
    return bool(_words_in(text))


def hidden(text: str) -> str:
    """The text with HIDDEN in place of the secrets of all forms."""
    if found := _words_in(text):
        for words, pattern, check in _COMPILED:
            if not words.isdisjoint(found):
                text = pattern.sub(partial(_hidden, check), text)
    return text


def _hidden(check: Callable[[str], bool] | None, found: re.Match[str]) -> str:
    if check is not None and not check(found["secret"]):
        return found[0]
    begin, end = (at - found.start() for at in found.span("secret"))
    return f"{found[0][:begin]}{HIDDEN}{found[0][end:]}"
