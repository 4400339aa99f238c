"""Writes the commit into a build, so that an installed package can name it: see collectives/version.py. pyproject.toml has the rest."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
version = runpy.run_path(str(ROOT / "collectives/version.py"))


def write_commit(folder: str) -> None:
    """Write the commit of this folder into a copy of the sources."""
    if (commit := version["commit_of"](ROOT)) != version["UNKNOWN"]:
        Path(folder, version["COMMIT_FILE"]).write_text(commit + "\n")


class BuildPy(build_py):
    """Copies the modules, and writes the commit beside them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # its modules are those of the checkout
            write_commit(self.build_lib)


class Sdist(sdist):
    """Makes an archive of the sources, which has no .git, with the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
