"""The tensors of a model that a save or a load with `only=` takes: patterns of the names of its parameters and buffers.

A parameter takes its state in the optimizer, its average, and its state of local steps and of compression along. All names of a tied
parameter count. A module of whose parameters one is taken takes its own buffers along, such as BatchNorm's statistics.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ckpt.convert.formats.safetensors import some
from ckpt.format.manifest import named, patterns_of, unmatched_error
from ckpt.ranks import Ranks
from collectives import Communicator
from mpitrain.weights.extra_state import is_extra_state
from mpitrain.weights.kinds.kind import There
from mpitrain.weights.meta.parts import SAVED_ONLY


class Chosen:
    """The choice of `patterns` in `model`. Collective if the model is a pipeline: `stages` are its ranks.

    `everything`: the names of all parameters and buffers of all stages. `names`: those that are chosen.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str], stages: Communicator | None) -> None:
        self.patterns = tuple(patterns)
        names_by_tensor: dict[int, list[str]] = {}  # several of a tied parameter
        params = dict(model.named_parameters(remove_duplicate=False))
        mine: list[str] = []
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(tensor := params.get(name, value), torch.Tensor) or is_extra_state(name):
                names_by_tensor.setdefault(id(tensor), []).append(name)
                mine.append(name)
        ties = [names for names in names_by_tensor.values() if len(names) > 1]
        chosen = set(named(mine, self.patterns))
        for names in ties:
            chosen.update(names if chosen.intersection(names) else ())
        modules = {_module_of(name) for name in chosen if name in params}
        chosen |= {name for name in mine if name not in params and _module_of(name) in modules}
        found = [(mine, chosen, ties)]
        if stages is not None and stages.size > 1:
            found = stages.all_gather_object(found[0])
        self.everything = list(dict.fromkeys(name for names, *_ in found for name in names))
        self.names = {name for _, names, _ in found for name in names}
        self._ties = [names for *_, ties in found for names in ties]

    def check_save(self) -> None:
        """ValueError for a pattern that matches no name of the model."""
        if problem := unmatched_error(self.everything, self.patterns):
            raise ValueError(f"only: in the model {problem}")

    def check_load(self, there: There) -> None:
        """ValueError for a pattern that matches no name of the model, or none in the checkpoint."""
        self.check_save()
        stored = {path.removeprefix("model/") for path in there.tensors if path.startswith("model/")}
        for names in self._ties:  # it is stored under one of them
            stored.update(names if stored.intersection(names) else ())
        if problem := unmatched_error(sorted(stored), self.patterns):
            raise ValueError(f"only: in {there.path} {problem}")
        if self.names.isdisjoint(stored):
            raise ValueError(f"only={list(self.patterns)} chooses no tensor of {there.path} that the model has")

    def of(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the tensors of a checkpoint that belong to what is chosen."""
        return {path: tensors[path] for path in self.paths(tensors)}

    def paths(self, tensors: Iterable[str]) -> list[str]:
        """The names of those, also of what the model does not have."""
        owners = {path: owner_of(path) for path in tensors}
        chosen = self.names.union(named(owners.values(), self.patterns))
        return [path for path, owner in owners.items() if owner in chosen]


def choose(
    model: nn.Module,
    only: str | Sequence[str] | None,
    ranks: Ranks,
    stages: Communicator | None,
    doing: str,
    there: There | None = None,
    *,
    is_expected: bool = True,
) -> Chosen | None:
    """What a save, or a load from `there`, takes by the argument `only`, or by the patterns that `there` was saved with; None: all.

    The stages of a pipeline may pass different patterns, such as the names of the parameters that they have: those of all count.

    Collective. ValueError or TypeError on all ranks for wrong patterns. Unless the caller expects it, a RuntimeWarning on rank 0 says
    that a checkpoint has only a part of the model.
    """
    if only is None and (there is None or SAVED_ONLY not in there.meta):
        return None
    with ranks.together(doing):
        given: Any = there.part(SAVED_ONLY) if only is None and there is not None else only
        is_empty = isinstance(given, Collection) and not len(given)  # as on a stage that trains nothing
        patterns = () if is_empty else patterns_of(given)
    if stages is not None and stages.size > 1:
        patterns = tuple(dict.fromkeys(chain(*stages.all_gather_object(patterns))))
    with ranks.together(doing):
        patterns_of(patterns)  # ValueError if no stage has one
    chosen = Chosen(model, patterns, stages)
    with ranks.together(doing):
        if there is None:
            chosen.check_save()
        elif only is not None:
            chosen.check_load(there)
    left = [] if only is not None or is_expected else [name for name in chosen.everything if name not in chosen.names]
    if left and ranks.rank == 0 and there is not None:
        warnings.warn(
            f"{there.path} was saved with only={list(patterns)}; {some(left)} of the model keep their values. If this is meant, pass "
            f"only= or strict=False to {doing}",
            RuntimeWarning,
            stacklevel=3,
        )
    return chosen


def owner_of(path: str) -> str:
    """The name, in the model, of the parameter or buffer to which a tensor in a checkpoint belongs: see state.py."""
    kind, _, name = path.partition("/")
    for _ in range({"optimizer": 1, "compression": 1, "extra_state": 1}.get(kind, 0)):
        name = name.partition("/")[2]
    if kind == "copies":  # copies/model/NAME, copies/optimizer/KEY/NAME
        return owner_of(name)
    return name


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
