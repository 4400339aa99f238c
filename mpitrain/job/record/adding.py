"""`mpitrain.log`: adds figures, sinks and callbacks to the run of this process."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.job.config import ConfigError
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.record.sinks.sink import Sink


class Moment(NamedTuple):
    """What a callback gets. `figures`: those of the moment, see `Callback`. The other fields are objects of the run on this rank."""

    step: int
    """Steps done."""
    figures: Mapping[str, Any]
    model: Any
    optimizer: Any
    comm: Any
    """The Communicator of all ranks of the run."""
    config: Any
    """The settings: a `mpitrain.job.config.Config`."""


class Callback:
    """Functions of a user that a run calls at named moments, on every rank, in the same order. Override those of interest.

    All but `failure` may call collectives, if all ranks do. An error that leaves a callback is an error of the run.
    """

    def step(self, moment: Moment) -> None:
        """After each step. `figures`: on rank 0 the line of metrics.jsonl, to which `log` adds now; on other ranks it is empty."""

    def evaluation(self, moment: Moment) -> None:
        """After an evaluation. `figures`: heldout_loss and, where the text is known, heldout_bits_per_byte; the same on all ranks."""

    def save(self, moment: Moment) -> None:
        """After a save, which may still go on in the background. `figures`: path, and cost_s, this rank's seconds."""

    def failure(self, moment: Moment) -> None:
        """An error ends the run on this rank. `figures`: error, the exception. Other ranks may be gone: no collectives here."""

    def end(self, moment: Moment) -> None:
        """The run ends regularly, after its last save. `figures`: reason, "finished" or "stopped"."""


class Added:
    """What `log` has added in this process."""

    figures: dict[str, float] = {}  # noqa: RUF012 - one for the process, as for a module
    sinks: list[Sink] = []  # noqa: RUF012
    callbacks: list[Callback] = []  # noqa: RUF012
    failed: set[str] = set()  # noqa: RUF012
    """The names of sinks that have failed: they are not opened again."""

    @classmethod
    def take_figures(cls) -> dict[str, float]:
        """The figures since the last call."""
        taken, cls.figures = cls.figures, {}
        return taken


def import_modules(names: Sequence[str]) -> None:
    """Import the modules and files of `log.modules`. ConfigError for one that cannot be found; an error in a module is its own."""
    for name in names:
        path = Path(name)
        if path.suffix != ".py":
            sys.path.insert(0, os.getcwd())
            try:
                found = importlib.util.find_spec(name)
            except (ImportError, ValueError):
                found = None
            if found is None:
                raise ConfigError(f"log.modules: expected Python modules or files, got {name}, which is neither")
            _run(lambda name=name: importlib.import_module(name), name)  # type: ignore[misc]
            continue
        if not path.is_file():
            raise ConfigError(f"log.modules: there is no file {path}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        loader = spec.loader
        _run(lambda loader=loader, module=module: loader.exec_module(module), name)  # type: ignore[misc]


def _run(act: Callable[[], object], name: str) -> None:
    """Run a module of the user. ConfigError with its own line for an error."""
    try:
        act()
    except Exception as error:
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).stem == Path(name).stem
        ]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        where = "" if line is None else f", line {line}"
        raise ConfigError(f"log.modules: {name}{where}: {type(error).__name__}: {error}") from error


def _shown(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def log(
    figures: Mapping[str, float] | None = None, *, sink: Sink | None = None, callback: Callback | None = None
) -> None:
    """Add figures to the current step, or a sink or callback to the run.

    Modules of the setting `log.modules` call it when they are imported, and callbacks at any moment. Not collective.

    Args:
        figures: names and numbers for the next line of metrics.jsonl and for all sinks. Rank 0 records them; on other ranks they are
            left out. A later value of the same name and step replaces an earlier one.
        sink: gets the figures of all later steps, on rank 0: see `mpitrain.Sink`. If it raises an error, the run says so
            once, and goes on without it.
        callback: is called at its moments on the rank that adds it, so all ranks must add it. See `Callback`.

    TypeError for figures that are not numbers, or names that are no text. ValueError for a name that the run itself records.
    """
    if not isinstance(figures if figures is not None else {}, Mapping):
        raise TypeError(f"log: expected a mapping of names to numbers, got {type(figures).__name__}")
    if sink is not None and not isinstance(sink, Sink):
        raise TypeError(f"log: expected a sink, an object of a class of mpitrain.Sink, got {_shown(sink)}")
    if callback is not None and not isinstance(callback, Callback):
        raise TypeError(f"log: expected a callback, an object of a class of mpitrain.Callback, got {_shown(callback)}")
    for name, value in (figures or {}).items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise TypeError(f"log: expected names that can be printed, got {name!r}")
        if name in RESERVED:
            raise ValueError(f"log: {name!r} is a figure of the run itself; choose another name, such as my/{name}")
        try:
            Added.figures[name] = float(
                "text" if isinstance(value, str) else value
            )  # a text that looks like a number is none
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise TypeError(f"log: expected names with numbers, got {name!r}: {type(value).__name__}") from None
    if sink is not None:
        Added.sinks.append(sink)
    if callback is not None:
        Added.callbacks.append(callback)


RESERVED = frozenset({*(field.name for field in fields(StepMetrics)), "heldout_loss", "heldout_bits_per_byte"}) - {
    "more"
}
"""Names that metrics.jsonl has already."""
