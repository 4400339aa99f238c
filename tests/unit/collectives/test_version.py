"""The version, the commit and the hash of the sources, in checkouts, worktrees and builds."""

import builtins
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from collectives import version

ROOT = Path(__file__).parents[3]
COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
BRANCH = "refs/heads/a/branch"


def write(files: dict[str, str], into: Path) -> Path:
    for name, text in files.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).write_text(text)
    return into


ORDER = [
    "0.0.9", "0.1.dev1", "0.1.0a1.dev1", "0.1.0a1", "0.1.0a2", "0.1.0b1", "0.1.0rc1", "0.1", "0.1.0.post1", "0.1.0.1", "0.1.1", "0.2",
    "0.10", "1.0", "999999999.0",
]  # fmt: skip


@pytest.mark.parametrize("here", range(len(ORDER)))
def test_a_newer_release_is_told_from_the_others(here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "VERSION", ORDER[here])
    found = [version.newer_release(str(version.Release(each, COMMIT))) for each in ORDER]
    assert found == [None] * (here + 1) + [(each, COMMIT[:10]) for each in ORDER[here + 1 :]]


def test_a_release_of_the_same_version_is_not_newer() -> None:
    assert version.newer_release(str(version.release())) is None
    assert version.newer_release(f"{version.VERSION}.0 (commit {OTHER})") is None
    assert version.newer_release("99.0.0+cu12.1 (commit unknown)") == ("99.0.0+cu12.1", "unknown")


@pytest.mark.parametrize(
    "told",
    [
        None, 99, True, ["99.0 (commit unknown)"], "", "99.0", "unknown", "99.0 (commit )", "99.0 (commit UNKNOWN)",
        "99.0 (commit unknown)\n",
        "99.0\x1b[2J (commit unknown)", "v99.0 (commit unknown)", "-99.0 (commit unknown)", "99.0 (commit unknown) and more",
        f"{'9' * 5000} (commit unknown)", f"99.0 (commit {'f' * 5000})", "9.9.9.9.9.9.9.9 (commit unknown)",
        "\u0669.0 (commit unknown)",
    ],
)  # fmt: skip
def test_what_is_no_release_is_not_newer(told: object) -> None:
    assert version.newer_release(told) is None


@pytest.mark.parametrize(
    "files",
    [
        {".git/HEAD": COMMIT + "\n"},
        {".git/HEAD": f"ref: {BRANCH}\n", f".git/{BRANCH}": COMMIT + "\n", ".git/packed-refs": f"{OTHER} {BRANCH}\n"},
        {".git/HEAD": f"ref: {BRANCH}\n", ".git/packed-refs": f"# pack-refs\n{OTHER} {BRANCH}s\n{COMMIT} {BRANCH}\n"},
        {
            ".git": "gitdir: main/.git/worktrees/w\n",
            "main/.git/worktrees/w/HEAD": f"ref: {BRANCH}\n",
            "main/.git/worktrees/w/commondir": "../..\n",
            f"main/.git/{BRANCH}": COMMIT,
        },
        {version.COMMIT_FILE: COMMIT + "\n"},
        {".git/HEAD": COMMIT, version.COMMIT_FILE: OTHER},  # of a build beside its sources
    ],
    ids=["detached", "branch", "packed", "worktree", "build", "checkout"],
)
def test_the_commit_is_found(files: dict[str, str], tmp_path: Path) -> None:
    assert version.commit_of(write(files, tmp_path)) == COMMIT


@pytest.mark.parametrize(
    "files",
    [
        {},
        {".git/HEAD": f"ref: {BRANCH}\n"},  # no commit yet
        {".git/HEAD": "gibberish"},
        {".git": "gitdir: /nowhere\n"},
        {version.COMMIT_FILE: "$Format$\n"},
    ],
)
def test_else_it_is_unknown(files: dict[str, str], tmp_path: Path) -> None:
    assert version.commit_of(write(files, tmp_path)) == "unknown"


def test_git_says_the_same() -> None:
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20)
    if git.returncode:
        pytest.skip("no checkout")
    assert version.release() == (version.VERSION, git.stdout.strip())


def test_the_hash_follows_names_and_sizes_and_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(name: str, files: dict[str, str]) -> bytes:
        write({"collectives/a.py": "1", "mpitrain/b/c.py": "22", **files}, tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", lambda *_, **__: pytest.fail("opened"))
            patch.setattr(Path, "open", lambda *_, **__: pytest.fail("opened"))
            return version.sources(tmp_path / name)

    plain = of("plain", {})
    same = {"mpitrain/b/c.py": "33", "mpitrain/__pycache__/x.py": "3", "mpitrain/note.orig": "3", "tests/t.py": "3"}
    assert of("same", same | {version.COMMIT_FILE: COMMIT}) == plain
    others = [
        of("larger", {"mpitrain/b/c.py": "333"}),
        of("more", {"ckpt/d.c": ""}),
        of("moved", {"mpitrain/c.py": "22"}),
    ]
    assert len({plain, *others}) == 4 and len(plain) == 8
    assert version.sources() == version.sources() != plain


def test_a_build_and_an_archive_of_the_sources_have_the_commit(tmp_path: Path) -> None:
    names = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "collectives/version.py", "collectives/__init__.py")
    checkout = write({name: (ROOT / name).read_text() for name in names} | {".git/HEAD": COMMIT}, tmp_path / "checkout")

    def setup(*words: str, cwd: Path) -> None:
        subprocess.run([sys.executable, "setup.py", "-q", *words], cwd=cwd, check=True, capture_output=True, timeout=60)

    setup("sdist", "--dist-dir", "../archive", "build_py", "--build-lib", "../build", cwd=checkout)
    assert (tmp_path / "build" / version.COMMIT_FILE).read_text() == COMMIT + "\n"
    assert not (checkout / version.COMMIT_FILE).exists()
    (archive,) = (tmp_path / "archive").iterdir()
    assert archive.name == f"mpitrain-{version.VERSION}.tar.gz"
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert version.commit_of(unpacked) == COMMIT


def test_a_process_may_have_loaded_older_sources_than_those_of_a_new_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "ckpt").mkdir()
    source, head = tmp_path / "ckpt/one.py", tmp_path / ".git/HEAD"
    source.write_text("")
    os.utime(source, (0, 0))
    head.write_text("1" * 40)
    monkeypatch.setattr(version, "_ROOT", tmp_path)
    monkeypatch.setattr(version, "release", lambda: version.Release("", "1" * 40))
    before = version.sources(tmp_path)
    assert version.loaded_sources() == before
    head.write_text("2" * 40)  # of a file that is no source
    assert version.loaded_sources() == before
    os.utime(source)
    assert len({version.loaded_sources(), version.loaded_sources(), version.sources(tmp_path)}) == 3
    head.write_text("1" * 40)
    assert version.loaded_sources() == before
