"""`python -m mpitrain watch RUN`: shows a run while it runs."""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console, Group
from rich.live import Live

from collectives import is_live_terminal
from mpitrain.view.picture import WIDTH, recorder, svg_file, write_svg
from mpitrain.view.watch.charts import Range, Screen
from mpitrain.view.watch.keys import Keys
from mpitrain.view.watch.view import view
from mpitrain.view.watch.watched import Watched

_LEAST_WIDTH = 20
_LOOK_S = 0.25  # how soon another size of the terminal is seen


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code. ValueError for wrong arguments, OSError for a picture that cannot be written."""
    options = _parser().parse_args(words)
    _check(options.run)
    console = Console(highlight=False, force_terminal=True if is_live_terminal() else None)
    is_live = console.is_terminal and not console.is_dumb_terminal
    if options.svg is None and not options.once and is_live:
        _watch(console, options.run, options.every, options.width)
        return 0
    if not options.run.is_dir():
        raise ValueError(
            f"watch: there is no folder {options.run}; expected the folder of a run, which --run named in training"
        )
    _show_once(options.run, options.width, options.svg)
    return 0


def _check(folder: Path) -> None:
    """ValueError for a file, OSError for a folder that this user may not read. A folder that is not there yet is fine."""
    try:
        os.stat(os.path.join(folder, "."))  # needs the right to enter it
        os.listdir(folder)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise ValueError(
            f"watch: {folder} is a file; expected the folder of a run, which --run named in training"
        ) from None
    except OSError as error:
        raise OSError(f"watch: {folder} cannot be read: {error.strerror or error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain watch",
        description="Shows a run while it runs, from the files in its folder. It changes nothing there, and needs neither MPI nor the "
        "host of the run. Keys: q quits, + and - (or up and down) zoom, left and right move.",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the folder of the run; in a terminal it may not exist yet"
    )
    parser.add_argument(
        "--every", type=_seconds, default=1.0, metavar="SECONDS", help="time between two looks (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one view and end (default if stdout is no terminal)")
    parser.add_argument(
        "--width", type=_width, metavar="N", help=f"characters of a line (default: the terminal's, or {WIDTH})"
    )
    parser.add_argument("--svg", type=svg_file, metavar="FILE", help="write one view as a picture, and end")
    return parser


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.05 to 3600, got {word}")
    return seconds


def _width(word: str) -> int:
    if not word.isdecimal() or not _LEAST_WIDTH <= int(word) <= 1000:
        raise argparse.ArgumentTypeError(f"expected a whole number from {_LEAST_WIDTH} to 1000, got {word}")
    return int(word)


def _show_once(folder: Path, width: int | None, picture: Path | None) -> None:
    run = Watched(folder)
    run.update()
    if picture is None:
        console = Console(highlight=False, width=width or (None if sys.stdout.isatty() else WIDTH))
    else:
        console = recorder(width or WIDTH)
    has_colour = console.color_system is not None
    is_ascii = picture is None and console.options.ascii_only
    screen = Screen(console.width, ascii_only=is_ascii, has_colour=has_colour)
    console.print(Group(*view(run, screen, Range())))
    if picture is not None:
        write_svg(console, picture, title=f"mpitrain watch {folder.resolve().name}")


def _watch(console: Console, folder: Path, every_s: float, width: int | None) -> None:
    """Show the run until q or Ctrl-C."""
    run, steps = Watched(folder), Range()
    looked_at, size = -math.inf, None
    with _signals() as stops, Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if stops:  # Ctrl-Z: the terminal is the shell's until the user comes back
                stops.clear()
                live.stop()
                keys.__exit__()
                os.kill(os.getpid(), signal.SIGSTOP)
                keys.__enter__()
                live.start()
                size = None
            is_due = time.monotonic() - looked_at >= every_s
            if is_due:
                run.update()
                looked_at = time.monotonic()
            if is_due or console.size != size:
                size = console.size
                screen = Screen(
                    min(width or size.width, size.width), size.height, console.options.ascii_only,
                    console.color_system is not None, has_keys=True,
                )  # fmt: skip
                live.update(Group(*view(run, screen, steps)), refresh=True)
            for key in keys.wait(min(max(looked_at + every_s - time.monotonic(), 0.0), _LOOK_S)):
                if key in ("q", "Q", "\x04"):
                    return
                steps, size = _changed(steps, key, 0 if run.last is None else run.last["step"]), None


def _changed(steps: Range, key: str, done: int) -> Range:
    """The range of steps after a key."""
    if key in ("+", "=", "up", "-", "_", "down"):
        return steps.zoomed(done, closer=key in ("+", "=", "up"))
    if key in ("left", "right"):
        return steps.moved(done, later=key == "right")
    return steps


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Ctrl-C, and the end of the terminal, end the block as a user's wish. SIGTERM ends the process, with the terminal as before.

    Ctrl-Z is put into the list.
    """
    stops: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    handlers = {signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGTSTP: stop}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stops
    except (KeyboardInterrupt, EOFError):
        pass
    finally:
        for number, old in before.items():
            signal.signal(number, old)
