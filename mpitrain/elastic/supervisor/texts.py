"""`shown` and `without_secrets` of `collectives.texts`. That package needs more than the standard library, so the file is loaded by its
path."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives import texts as _texts
else:

    def _loaded() -> ModuleType:
        package = find_spec("collectives")  # which does not import it
        spec = spec_from_file_location(f"{__name__}.loaded", Path(package.origin).with_name("texts.py"))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    _texts = _loaded()


def public(text: str, *, lines: bool = False) -> str:
    """The text for people: without secrets in addresses, and with escapes for control characters; see `collectives.texts.shown`."""
    return _texts.shown(_texts.without_secrets(text), lines=lines)
