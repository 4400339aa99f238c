"""What `--help` prints: every setting with its type, its default, and the docstring under its field."""

from __future__ import annotations

import argparse
import ast
import inspect
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from mpitrain.config import settings
from mpitrain.config.settings import Config, flat, kinds
from mpitrain.config.writing import text_of


def print_help(config: Config) -> None:
    """Print all settings. `config`: the defaults."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain",
        usage="%(prog)s [--config FILE] [--section.name value ...]",
        description="Train a model. Settings: built-in defaults, then a TOML file (--config FILE), then the flags below.",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings, with the sections below")
    docs, values = _docs(), flat(config)
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for name, kind in kinds().items():
        section, _, key = name.rpartition(".")
        owner = type(getattr(config, section)) if section else Config
        if section not in groups:
            groups[section] = parser.add_argument_group(section, inspect.getdoc(owner))
        doc = f"{docs[owner.__name__, key]} (default: {text_of(values[name])})".replace("%", "%%")
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            groups[section].add_argument(flag, _negated(flag), action="store_true", help=doc)
        else:
            groups[section].add_argument(flag, metavar=_metavar(kind), nargs=_count(kind), help=doc)
    parser.print_help()


def _docs() -> dict[tuple[str, str], str]:
    """The docstrings under the fields, by class and field: Python itself does not keep them."""
    docs = {}
    classes = (node for node in ast.parse(inspect.getsource(settings)).body if isinstance(node, ast.ClassDef))
    for owner in classes:
        for field, doc in pairwise(owner.body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                docs[owner.name, ast.unparse(field.target)] = ast.literal_eval(doc.value)
    return docs


def _negated(flag: str) -> str:
    section, dot, key = flag.rpartition(".")
    return f"{section}{dot}no-{key}"


def _metavar(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return f"{_metavar(arguments[0])}|none"
    if origin is Literal:
        return f"{{{','.join(map(str, arguments))}}}"
    return _metavar(arguments[0]) if origin is tuple else kind.__name__.upper()


def _count(kind: Any) -> int | str | None:
    if get_origin(kind) is not tuple:
        return None
    return "*" if Ellipsis in get_args(kind) else len(get_args(kind))
