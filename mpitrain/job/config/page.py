"""`python -m mpitrain.job.config.page` prints docs/settings.md: all settings, from the code."""

from mpitrain.job.config.settings import Config
from mpitrain.job.config.writing import sections

_PAGE = """# All settings

Each setting is an option of `python -m mpitrain`. An option that is true or false needs no value: `--train.eval-only` is true, and
`--train.no-eval-only` is false. In a TOML file (`--config FILE`) the option `--train.batch 24` is `batch = 24` below `[train]`.
`python -m mpitrain.job.config.page` prints this page from the code, and `python -m mpitrain --help` prints it as text.
"""


def page() -> str:
    """The page, as Markdown."""
    parts = [_PAGE]
    for section, about, settings in sections(Config()):
        lines = [f"## {section}", "", about, ""] if section else []
        lines += ["| option | value | default | meaning |", "| --- | --- | --- | --- |"]
        for one in settings:
            meaning = one.meaning.replace("|", "\\|")
            lines.append(f"| `{one.flag}` | {one.value} | `{one.default}` | {meaning} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
