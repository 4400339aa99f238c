"""Settings as text: TOML, differences between two settings, and the text of `--help`."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from mpitrain.job.config.settings import Config, flat, kinds

_HELP = """usage: python -m mpitrain [--help] [--config FILE] [--section.name value ...]

Train a model. Settings: built-in defaults, then a TOML file (--config FILE), then the flags below.
A bool needs no value: --train.eval-only is true, --train.no-eval-only is false.
"""


def to_toml(config: Config) -> str:
    """The settings as TOML. `from_toml` and `parse` make settings of the same effect from it. Values that are None are left out.

    The optimizer's own numbers (`OptimConfig.resolve`) are written, so that the text tells them also when defaults have changed.
    """
    sections: dict[str, list[str]] = {}
    for name, value in flat(config).items():
        section, _, key = name.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{key} = {_text(value)}")
    return "\n\n".join("\n".join([f"[{name}]", *lines] if name else lines) for name, lines in sections.items()) + "\n"


def differences(a: Config, b: Config) -> list[str]:
    """The changes from `a` to `b`, one line per setting: `optim.lr: 0.001 -> 0.002`."""
    after = flat(b)
    return [f"{k}: {_text(v)} -> {_text(after[k])}" for k, v in flat(a).items() if v != after[k]]


class Setting(NamedTuple):
    """A setting in words."""

    flag: str
    value: str
    default: str
    meaning: str


def print_help(config: Config) -> None:
    """Print every setting with its type, its default (the value in `config`), and the docstring under its field."""
    print(_HELP)
    width = shutil.get_terminal_size().columns
    for section, about, settings in sections(config):
        if section:
            print(f"\n[{section}] {about}\n")
        for setting in settings:
            print(f"  {setting.flag}  {setting.value} (default: {setting.default})")
            print(textwrap.fill(setting.meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6))


def sections(config: Config) -> Iterator[tuple[str, str, list[Setting]]]:
    """Each section with what it is about, and its settings; first those of the run, in the section "". Defaults: those of `config`."""
    for section, names in groupby(kinds(), key=lambda name: name.rpartition(".")[0]):
        owner = type(getattr(config, section)) if section else Config
        docs = _docs(owner)
        settings = [
            Setting(
                f"--{name.replace('_', '-')}",
                wanted(kinds()[name]),
                _text(attrgetter(name)(config)),
                docs[name.rpartition(".")[2]],
            )
            for name in names
        ]
        yield section, inspect.getdoc(owner) or "", settings


def _docs(owner: type) -> dict[str, str]:
    """The docstrings under the fields of a class: Python does not store them."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(owner)).body if isinstance(node, ast.ClassDef))
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(doc.value).split())
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }


def wanted(kind: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return f"{wanted(arguments[0])} or none"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        number = "any number of values" if arguments[-1] is Ellipsis else f"{len(arguments)} values"
        return f"{number}, each {wanted(arguments[0])}"
    if is_dataclass(kind):
        return f"a table with {', '.join(field.name for field in fields(kind))}, in a TOML file"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _text(value: Any) -> str:
    """A value as TOML writes it."""
    if value is None:
        return "none"  # only in `differences`: TOML has no null
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(_text(v) for v in value)}]"
    if is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in fields(value))
        return f"{{{', '.join(f'{name} = {_text(each)}' for name, each in items if each is not None)}}}"
    return repr(value)
