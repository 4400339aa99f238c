"""What rank 0 does with the figures of a run: the run's own files, and sinks."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.job.config import Config, public
from mpitrain.job.config.settings import flat
from mpitrain.job.record.adding import Added
from mpitrain.job.record.files.lines import LinesFile
from mpitrain.job.record.sinks import About, Sink, make_sinks


class RunOutput:
    """The files and sinks of a run, on rank 0.

    Args:
        config: the settings.
        folder: of the run.
        steps_done: the step after which the run goes on; what there is of later steps, from before a crash, is void.
        told: gets the name of a sink that has failed, and its error.
        say: prints a line.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        steps_done: int,
        told: Callable[[str, str], object],
        say: Callable[[str], object],
    ) -> None:
        self._told, self._say, self._full = told, say, set[LinesFile]()
        self._figures = LinesFile(folder / "metrics.jsonl", steps_done=steps_done)
        self._ranks = LinesFile(folder / "ranks.jsonl", steps_done=steps_done)
        self.num_cut = self._figures.num_cut
        """The number of steps that are done again."""
        shown = public(config)
        about = About(folder, steps_done, flat(shown), shown.log.project)
        names = [*config.log.sinks, *(type(sink).__name__ for sink in Added.sinks)]
        self._sinks = list(zip(names, [*make_sinks(config.log.sinks), *Added.sinks], strict=True))
        self._sinks = [(name, sink) for name, sink in self._sinks if name not in Added.failed]
        self._to_sinks(lambda sink: sink.open(about))

    def step(self, entry: Mapping[str, Any]) -> None:
        """The figures of a step, with its number."""
        self._write(self._figures, entry)
        if self._sinks:
            step, figures = _without_step(entry)
            self._to_sinks(lambda sink: sink.step(step, figures))

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        """The figures of an evaluation, with its number of steps."""
        self._write(self._figures, entry)
        step, figures = _without_step(entry)
        self._to_sinks(lambda sink: sink.evaluation(step, figures))

    def ranks(self, entry: Mapping[str, Any]) -> None:
        """The figures of all ranks: see record/ranks.py."""
        self._write(self._ranks, entry)

    def event(self, event: Mapping[str, Any]) -> None:
        """An event, which is in events.jsonl already."""
        self._to_sinks(lambda sink: sink.event(event))

    def check(self) -> None:
        """Raise OSError if lines could not be written."""
        self._figures.check()
        self._ranks.check()

    def close(self, *, goes_on: bool = False) -> None:
        """Close all. goes_on: the run opens the files and sinks again, so nothing waits for the end of other tools."""
        self._figures.close()
        self._ranks.close()
        sinks, self._sinks = self._sinks, []  # an event about one that fails now goes to none of them
        for name, sink in sinks:
            try:
                sink.leave() if goes_on else sink.close()
            except Exception as error:
                self._fail(name, error)

    def _to_sinks(self, act: Callable[[Sink], object]) -> None:
        """Act on each sink. One that fails is told once, closed, and left out from then on: it must not end the run."""
        for name, sink in self._sinks.copy():
            try:
                act(sink)
            except Exception as error:
                self._sinks.remove((name, sink))
                with suppress(Exception):
                    sink.close()
                self._fail(name, error)

    def _write(self, file: LinesFile, entry: Mapping[str, Any]) -> None:
        """Add a line. A full disk is said once: the lines are kept, and written when there is room."""
        file.write(entry)
        if not file.problem:
            self._full.discard(file)
        elif file not in self._full:
            self._full.add(file)
            self._say(f"step {entry['step']}: {file.problem}; its lines wait in memory until they can be written")

    def _fail(self, name: str, error: Exception) -> None:
        Added.failed.add(name)
        self._told(name, " ".join(f"{type(error).__name__}: {error}".split()))


def _without_step(entry: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    figures = dict(entry)
    return figures.pop("step"), figures
