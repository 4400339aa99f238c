"""Settings from flags and TOML files. The words of a flag become the value that TOML would give; msgspec checks the types of both.

Every error is one line. Libraries for flags do not offer this.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from collectives.secret_forms import HIDDEN
from collectives.texts import without_secrets
from mpitrain.files import no_code, read_named, read_toml, toml_of
from mpitrain.job.config.errors import ConfigError
from mpitrain.job.config.secrets import CODE, ON_EVENT, Bounded, public, reachable
from mpitrain.job.config.settings import Config, kinds
from mpitrain.job.config.writing import print_help, wanted


def parse(argv: Sequence[str], defaults: Config | None = None) -> Config:
    """Settings from the command line's arguments (without the program's name).

    Flags: `--section.name value` or `--section.name=value`, with - or _ within a name; a bool takes no value
    (`--train.eval-only`, `--train.no-eval-only`); several values follow one another (`--data.path a b`); `none` unsets
    an optional setting; the last of repeated flags is used. `--model small` means `--model.size small`. `--help` prints all
    settings and exits with 0.

    Args:
        argv: the arguments.
        defaults: the values of settings that are neither in the file nor in a flag.

    Raises:
        ConfigError: an unknown setting, a wrong type, a value out of range, a file that cannot be read, or code in a file that others
            could have written.
    """
    base = defaults or Config()
    if "-h" in argv or "--help" in argv:
        print_help(base)
        raise SystemExit(0)
    flags = _read_flags(argv)
    file = flags.pop("config", None)
    return _build(base, ({} if file is None else _read_toml(file, flags)) | flags)


def from_toml(path: str | os.PathLike[str]) -> Config:
    """Settings from a TOML file with the sections of `Config`; raises ConfigError like `parse`."""
    return _build(Config(), _read_toml(path, {}))


def of_run(path: Path) -> Config:
    """The settings in the file of a run's folder, for an evaluation: `reachable`, without secrets. Raises ConfigError like `parse`.

    The folder may be a stranger's: no command and no module is taken from it, and the file is a regular one of a usual length.
    """
    try:
        values = _read_document(lambda: _values_of(read_toml(path), str(path)), str(path))
    except OSError as error:
        raise ConfigError(f"settings file {path}: {error.strerror or error}") from None
    found = reachable(public(_build(Config(), values), Bounded()))
    return replace(found, log=replace(found.log, modules=()))  # `public` has left out the other one of CODE


def from_text(text: str, source: str) -> Config:
    """Settings from the text that `to_toml` made; raises ConfigError like `parse`, with `source` in the message."""
    return _build(Config(), _read_text(text, source))


_MAX_SAID = 1000  # characters of an error about a file
_SHORT = {"model": "model.size"}
"""Short names of settings."""
_CONSTANTS = {"true": True, "false": False, "none": None}
_SWITCHES: dict[Any, tuple[str, ...]] = {bool: ("true", "false"), bool | None: ("true", "false", "none")}
"""The types of settings whose flags need no value, and the words that are a value."""
_WERE_BOOLS = {"parallel.checkpoint_activations": ("none", "block")}
"""Settings that were bools, with what false and true mean now. Checkpoints of version 0.1 contain such values, and flags may."""


def _build(base: Config, changes: Mapping[str, Any]) -> Config:
    """`base` with `changes`, made in one go, so that values that depend on each other are checked only when all are there."""
    tops: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        (sections.setdefault(section, {}) if section else tops)[key] = value
    return replace(base, **tops, **{name: replace(getattr(base, name), **new) for name, new in sections.items()})


def _read_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Values of the flags by full name, including `config`."""
    types = kinds() | {"config": str}
    values: dict[str, Any] = {}
    words, name = list(argv), ""
    while words:
        flag, equals, word = words.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            if name == ON_EVENT:  # the word may be a secret
                raise ConfigError(f"--{ON_EVENT}: expected the command as one word, in quotes, got several")
            raise ConfigError(f"unexpected {flag + equals + word!r}: settings are given as --section.name value")
        name, on = flag[2:].replace("-", "_"), True
        name = _SHORT.get(name, name)
        positive = name.replace("no_", "", 1)
        if name not in types and (types.get(positive) in _SWITCHES or positive in _WERE_BOOLS):
            name, on = positive, False
        if name not in types:
            raise ConfigError(f"unknown setting {flag}: {_hint(name, types, '--{}')}")
        kind = types[name]
        many = get_origin(kind) is tuple
        given = [word] if equals else []
        while not equals and words and not words[0].startswith("--") and (many or not given):
            if kind in _SWITCHES and (not on or words[0].lower() not in _SWITCHES[kind]):
                break
            given.append(words.pop(0))
        if not on and given:
            raise ConfigError(f"{flag}: expected no value, got {given[0]!r}")
        if not given and (kind in _SWITCHES or name in _WERE_BOOLS):
            values[name] = _present(name, on)
        elif many:
            values[name] = _checked([_value(w, get_args(kind)[0]) for w in given], kind, flag)
        elif given:
            values[name] = _checked(_present(name, _value(given[0], kind)), kind, flag)
        else:
            raise ConfigError(f"{flag}: expected {wanted(kind)} after it, got nothing")
    return values


def _read_toml(path: str | os.PathLike[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a TOML file by full name. ConfigError if others could have written one that is code and no flag replaces."""
    try:
        text, reason = read_named(path)
    except OSError as error:
        raise ConfigError(f"settings file {os.fspath(path)}: {error.strerror or error}") from None
    except ValueError as error:  # bytes that are not UTF-8
        raise ConfigError(f"settings file {os.fspath(path)} is not valid TOML: {error}") from None
    values = _read_text(text, os.fspath(path))
    if reason and (code := [name for name in CODE if values.get(name) and name not in flags]):
        raise ConfigError(no_code(code[0], path, reason))
    return values


def _read_text(text: str, source: str) -> dict[str, Any]:
    """Values of a TOML document by full name; errors name `source`."""
    return _read_document(lambda: _values_of(toml_of(text), source), source)


def _read_document(read: Callable[[], dict[str, Any]], source: str) -> dict[str, Any]:
    """What `read` gives. ConfigError, which names `source` and is not long, for a ValueError."""
    try:
        return read()
    except ConfigError as error:
        if len(said := str(error)) > _MAX_SAID:  # it has a name or a value of a stranger
            raise ConfigError(f"{said[:_MAX_SAID]} ...") from None
        raise
    except ValueError as error:  # also of a number of too many digits
        raise ConfigError(f"settings file {source} is not valid TOML: {error}") from None


def _values_of(document: Mapping[str, Any], source: str) -> dict[str, Any]:
    types = kinds()
    sections = {name.partition(".")[0] for name in types if "." in name}
    entries: dict[str, Any] = {}
    for top, content in document.items():
        if top in sections:
            if not isinstance(content, dict):
                raise ConfigError(
                    f"{top} in {source}: expected a section [{top}], got {without_secrets(repr(content)):.200}"
                )
            entries |= {f"{top}.{key}": value for key, value in content.items()}
        elif isinstance(content, dict) and top not in types:
            raise ConfigError(f"unknown section [{top}] in {source}: {_hint(top, sections, '[{}]')}")
        else:
            entries[top] = content
    return _known(entries, source)


def _known(entries: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Values by full name with their types."""
    types = kinds()
    values: dict[str, Any] = {}
    for name, value in entries.items():
        if name not in types:
            raise ConfigError(f"unknown setting {name} in {source}: {_hint(name, types, '{}')}")
        values[name] = _checked(_present(name, value), types[name], f"{name} in {source}")
    return values


def _present(name: str, value: Any) -> Any:
    """The value of a setting, in place of one that it had in an earlier version."""
    word = str(value).lower()
    return _WERE_BOOLS[name][word == "true"] if name in _WERE_BOOLS and word in ("true", "false") else value


def _value(word: str, kind: Any) -> Any:
    """A flag's word as the value that TOML would give. A word that is no constant and no number stays a text."""
    if kind is str or (get_origin(kind) is Literal and isinstance(get_args(kind)[0], str)):
        return word
    if kind == str | None:
        return None if word.lower() == "none" else word
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(word)
    return word


def _checked(value: Any, kind: Any, name: str) -> Any:
    """The value if it has the type `kind`, else ConfigError. A whole number also counts as a float."""
    if get_origin(kind) is tuple and isinstance(value, list):
        for item in value:
            _checked(item, get_args(kind)[0], name)
    if isinstance(value, str) and not _is_text(value):
        raise ConfigError(f"{name}: expected text in UTF-8, which a TOML file can hold, got {value!r:.200}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{name}: expected a number below 2**63, got one of {value.bit_length()} bits")
    if is_dataclass(kind) and isinstance(value, dict):
        names = [field.name for field in fields(kind)]
        if unknown := sorted(value.keys() - set(names)):
            raise ConfigError(f"{name}: unknown setting {unknown[0]}: {_hint(unknown[0], names, '{}')}")
        types = get_type_hints(kind)
        for key, item in value.items():
            _checked(item, types[key], f"{name}, {key}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):  # of the table's own check
            raise error.__cause__ from None
        given = HIDDEN if ON_EVENT in name.replace("-", "_") else f"{without_secrets(repr(value)):.200}"
        raise ConfigError(f"{name}: expected {wanted(kind)}, got {given}") from None


def _is_text(value: str) -> bool:
    """Whether it can be written in UTF-8: a flag may have bytes that cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _hint(name: str, known: Iterable[str], form: str) -> str:
    """A suggestion for a wrong name: a setting of the same name in another section, else the setting with the most similar name."""
    names = sorted(known)
    if inside := [n for n in names if n.startswith(f"{name}.")]:
        return f"{name} is a section; its settings are {', '.join(_shown(n, form) for n in inside)}"
    leaf = _leaf(name)
    if same := [n for n in names if _leaf(n) == leaf]:
        near = difflib.get_close_matches(name, same, n=1, cutoff=0)
    else:
        near = difflib.get_close_matches(name, names, n=1)
    if not near:
        leaves = difflib.get_close_matches(leaf, map(_leaf, names), n=1)
        near = [n for n in names if _leaf(n) in leaves]
    return f"did you mean {_shown(near[0], form)}?" if near else "--help shows all settings"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _shown(name: str, form: str) -> str:
    """A name as the user would write it in a flag or a file."""
    return form.format(name.replace("_", "-") if form.startswith("--") else name)
