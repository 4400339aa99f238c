"""Pictures need matplotlib, which this file imports only when a command draws a picture."""

from typing import TYPE_CHECKING

from collectives.shared.terminal import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def need_matplotlib(flag: str = "--plot") -> None:
    """UsageError if matplotlib cannot be imported. Called before the work for the picture. `flag`: what asked for it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(f"{flag} needs matplotlib: pip install 'mpitrain[plot]', or leave out {flag}") from None


def new_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches. UsageError if matplotlib is missing."""
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
