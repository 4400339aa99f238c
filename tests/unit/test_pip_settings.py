"""What setup tells uv of pip's configuration."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "mpirun/pip_settings.py"
spec = importlib.util.spec_from_file_location("pip_settings", SCRIPT)
assert spec is not None and spec.loader is not None
pip_settings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pip_settings)


def test_settings_of_install_and_of_variables_override_those_of_all_commands() -> None:
    listing = """:env:.index-url='https://c/simple'
download.index-url='https://d/simple'
global.index-url='https://a/simple'
global.extra-index-url='\\nhttps://x/simple\\nfile:///y/simple'
install.index-url='https://b/simple'
install.find-links='/wheels /more'
"""
    assert pip_settings.to_uv(pip_settings.read(listing)) == {
        "UV_DEFAULT_INDEX": "https://c/simple",
        "UV_INDEX": "https://x/simple file:///y/simple",
        "UV_FIND_LINKS": "/wheels,/more",
    }


@pytest.mark.parametrize(("value", "said"), [("1", {"UV_NO_INDEX": "1"}), ("true", {"UV_NO_INDEX": "1"}), ("0", {})])
def test_switches(value: str, said: dict[str, str]) -> None:
    assert pip_settings.to_uv({"no-index": value}) == said


def test_the_whole_script_reads_files_and_variables_and_leaves_those_of_uv(tmp_path: Path) -> None:
    """With the pip of this environment itself, whose listing it is, and not the one of the current folder."""
    (tmp_path / "pip.py").write_text("raise SystemExit('a stranger')\n")
    (tmp_path / "pip.conf").write_text(
        "[global]\ntrusted-host = a\n    b\ncert = /certificates.pem\nconstraint = /c.txt\n[install]\nproxy = http://p\n"
    )
    environment = {
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_NO_INDEX": "yes",
        "PIP_FIND_LINKS": "/wheels",
        "UV_FIND_LINKS": "/mine",
        "HOME": str(tmp_path),
        "XDG_CONFIG_DIRS": str(tmp_path),
    }
    printed = subprocess.run(
        [sys.executable, SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    lines = set(printed.splitlines())
    assert lines >= {
        "UV_INSECURE_HOST=a b",
        "SSL_CERT_FILE=/certificates.pem",
        "UV_CONSTRAINT=/c.txt",
        "ALL_PROXY=http://p",
        "UV_NO_INDEX=1",
    }
    assert not any(line.startswith("UV_FIND_LINKS") for line in lines)
