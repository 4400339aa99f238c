"""The sink `tensorboard`: files of events in RUN/tensorboard, which `tensorboard --logdir RUN` reads."""

import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from mpitrain.files import make_folder
from mpitrain.job.record.sinks import event_file
from mpitrain.job.record.sinks.event_file import EventFile
from mpitrain.job.record.sinks.sink import About, Figures, Sink, tag

_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,15})\.", re.ASCII)


class TensorBoard(Sink):
    """Figures as scalars, events and settings as texts, and settings as hyperparameters.

    Each start makes a file, which begins with a start of a session at the first step to come. TensorBoard then forgets what other files
    have of this step and of later ones.
    """

    def __init__(self) -> None:
        self._file: EventFile | None = None
        self._tags: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._last_step = 0

    def open(self, about: About) -> None:
        self._last_step, now = about.steps_done, time.time()
        folder = about.folder / "tensorboard"
        make_folder(folder)
        # TensorBoard reads the files in the order of their names.
        earlier = [int(found[1]) for path in folder.iterdir() if (found := _NAME.match(path.name))]
        number = max([int(now), *(last + 1 for last in earlier)])
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = EventFile(folder / name, now)
        self._file.write(now, about.steps_done + 1, event_file.session_start())
        settings = {name: str(setting).replace("|", "\\|") for name, setting in about.settings.items()}
        rows = [f"| {name} | `{setting}` |" for name, setting in settings.items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
        self._file.write(now, about.steps_done, event_file.text("settings", table))
        self._file.write(now, about.steps_done, event_file.hparams(about.settings, now))

    def step(self, step: int, figures: Figures) -> None:
        self._last_step = step
        self._add(step, figures)

    def evaluation(self, step: int, figures: Figures) -> None:
        self._add(step, figures)

    def event(self, event: Mapping[str, Any]) -> None:
        step = event.get("step")
        if not isinstance(step, int) or step < 0:
            step = self._last_step
        words = "    " + json.dumps(event, indent=4, default=str).replace("\n", "\n    ")  # as code
        assert self._file is not None
        self._file.write(time.time(), step, event_file.text(f"events/{event.get('event', 'event')}", words))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _add(self, step: int, figures: Figures) -> None:
        names = tuple(figures)
        tags = self._tags.get(names)
        if tags is None:
            tags = self._tags[names] = tuple([tag(name) for name in names if name != "time"])
        values = [math.nan if value is None else value for name, value in figures.items() if name != "time"]
        assert self._file is not None
        self._file.write_scalars(figures.get("time") or time.time(), step, tags, values)
