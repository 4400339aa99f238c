"""Prints what pip's configuration and PIP_ variables say about where packages come from, as the environment variables of uv.

uv reads neither. One NAME=value a line; a variable of uv's that the caller has set stays as it is. The script setup starts this, with
.venv's Python.
"""

import ast
import os
import subprocess
import sys

# pip's name of a setting: uv's variable, and what stands between the values of one that pip takes several of
ONE = {
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
SEVERAL = {
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "constraint": ("UV_CONSTRAINT", " "),
}
SWITCHES = {"no-index": "UV_NO_INDEX", "no-cache-dir": "UV_NO_CACHE"}
SECTIONS = ("global", "install", ":env:")  # each overrides those before it


def read(listing: str) -> dict[str, str]:
    """The settings that `pip install` goes by, from what `pip config list` prints: section.name='value' lines."""
    sections: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name.replace("_", "-")] = ast.literal_eval(value)
    return {name: value for section in SECTIONS for name, value in sections[section].items()}


def to_uv(settings: dict[str, str]) -> dict[str, str]:
    """The same as variables of uv."""
    variables = {}
    for name, value in settings.items():
        if name in ONE:
            variables[ONE[name]] = value
        elif name in SEVERAL:
            variable, between = SEVERAL[name]
            variables[variable] = between.join(value.split())
        elif name in SWITCHES and value.lower() in ("1", "true", "yes", "on"):
            variables[SWITCHES[name]] = "1"
    return variables


def main() -> None:
    """Print them."""
    listing = subprocess.run(  # -P: not the pip of the current folder, in which anything may lie
        [sys.executable, "-P", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    for name, value in to_uv(read(listing.stdout)).items():
        if name not in os.environ:
            print(f"{name}={value}")


if __name__ == "__main__":
    main()
