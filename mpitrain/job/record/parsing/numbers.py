"""Numbers in words."""

from collections.abc import Sequence


def steps_in_words(steps: Sequence[int], most: int = 5) -> str:
    """The first steps of a growing list; empty without one."""
    if not steps:
        return ""
    more = f" and {len(steps) - most:,} more" if len(steps) > most else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps[:most])}{more}"


def in_words(seconds: float) -> str:
    """A measured time with its unit: 3.2 ms, 41.0 s, 2 h 5 min. Clocks that run show `duration`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def bytes_in_words(nbytes: float) -> str:
    """A number of bytes with its unit."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """The time until or since a moment, as a clock shows it: 0:42, 5:12, 3:07:55, 2 d 4 h."""
    whole = round(seconds)
    if whole >= 48 * 3600:
        hours = round(seconds / 3600)
        return f"{hours // 24} d {hours % 24} h"
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
