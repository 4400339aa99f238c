"""A run in trackio. It is called by program.py alone."""

import os
import sqlite3
from contextlib import closing

from mpitrain.job.record.sinks.sink import About


class TrackioRun:
    """The run in the project `About.project` of trackio's database on this machine (TRACKIO_DIR).

    Its name there is that of the run's folder and an id, which stands in RUN/trackio.id, because trackio finds a run by its name.
    """

    def __init__(self, about: About, run_id: str) -> None:
        is_local = not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))
        if is_local:
            os.environ["HF_HUB_OFFLINE"] = "1"  # it would ask the hub for the user's name
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        import trackio

        name = f"{about.folder.name}-{run_id}"
        if is_local:
            _cut(about, name)
        self._run = trackio.init(
            project=about.project,
            name=name,
            config=about.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # the run has its own gauges
            auto_log_cpu=False,
        )
        self._alert_level = trackio.AlertLevel.WARN

    def log(self, step: int, figures: dict[str, float]) -> None:
        """See Tool."""
        self._run.log(figures, step=step)

    def alert(self, title: str, text: str) -> None:
        """See Tool."""
        self._run.alert(title, text, level=self._alert_level)

    def finish(self, *, is_ok: bool) -> None:
        """See Tool."""
        self._run.finish()


def _cut(about: About, name: str) -> None:
    """Delete the rows of steps that are void. trackio has no call for this.

    It does nothing where trackio keeps files of lines, on a network file system.
    """
    from trackio.sqlite_storage import SQLiteStorage

    path = SQLiteStorage.get_project_db_path(about.project)
    if path.exists():
        with closing(sqlite3.connect(path, timeout=30.0)) as database, database:
            database.execute("DELETE FROM metrics WHERE run_name = ? AND step > ?", (name, about.steps_done))
