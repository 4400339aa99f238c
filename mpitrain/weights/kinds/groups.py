"""The settings of an optimizer's groups (lr, betas, initial_lr, ...) in a checkpoint.

The meta has the settings of each group as JSON (plain_values.py), and beside them the names of its parameters. A load finds the group
of a parameter by its name. So groups may be in another order, and a stage of a pipeline may have only some of a group's parameters.
The groups of all stages are there one after the other, because stages may number theirs differently.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt.convert.formats.safetensors import some
from collectives import Communicator
from mpitrain.weights.kinds.kind import There
from mpitrain.weights.meta.plain_values import decoded, encoded, small_tensor

_OWN = ("params", "param_names")
"""What a group has of its own, and never takes from a checkpoint."""

_REMEDY = "make the same groups, or pass hyperparameters=False to keep the settings of those here"


class SavedGroups:
    """The groups of `optimizer`, whose parameters have `names`. `stages`: the ranks of the pipeline, or None; then it is collective.

    A save or a load of a part of the model knows the names of some parameters alone. A group that has others only takes no part.
    `strict`: a load is for exactly the parameters of the checkpoint's optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        stages: Communicator | None,
        *,
        strict: bool,
    ) -> None:
        self._stages = stages if stages is not None and stages.size > 1 else None
        self._num, self._strict = len(optimizer.param_groups), strict
        self._groups: dict[int, dict[str, Any]] = {}  # by number
        self._names: dict[int, list[str]] = {}
        for number, group in enumerate(optimizer.param_groups):
            known = [names[param] for param in group["params"] if param in names]
            if known or not group["params"]:
                self._groups[number], self._names[number] = group, known
        self._of_stages = [self._names] if self._stages is None else self._stages.all_gather_object(self._names)
        self._taken: list[tuple[dict[str, Any], dict[str, Any]]] = []  # a group, and all its settings
        self._shared: dict[tuple[int, str], Any] = {}

    def settings(self) -> dict[int, dict[str, Any]]:
        """The settings of this rank's groups as JSON. TypeError for one that a checkpoint cannot keep."""
        return {
            number: {
                _text(key, number): encoded(value, f"{key!r} of the optimizer's group {number}")
                for key, value in group.items()
                if key not in _OWN
            }
            for number, group in self._groups.items()
        }

    def meta(self, settings: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """What the checkpoint has of them. Collective over the stages of a pipeline.

        A group that is empty on all stages is there once, and else where it has parameters.
        """
        of_stages = [settings] if self._stages is None else self._stages.all_gather_object(settings)
        done = {number for names in self._of_stages for number, its in names.items() if its}
        found: dict[str, Any] = {"groups": [], "names": []}
        for theirs, names in zip(of_stages, self._of_stages, strict=True):
            for number, its in names.items():
                if its or number not in done:
                    found["groups"].append(theirs[number])
                    found["names"].append(list(dict.fromkeys(its)))
                    done.add(number)
        return found

    def begin(self, there: There) -> None:
        """Find the settings that `take` gives to the groups. ckpt.CheckpointError if the groups there are others."""
        saved = there.part("optimizer")
        assert saved is not None
        groups, names = saved["groups"], saved.get("names")
        if names is not None:
            places = self._places(there.path, names, [json.dumps(its, sort_keys=True) for its in groups])
        elif len(groups) == self._num:
            places = {number: number for number in self._groups}  # saved by an older version: their order decides
        else:
            raise ckpt.CheckpointError(
                f"{there.path}: the optimizer has {len(groups)} parameter groups there, {self._num} here; {_REMEDY}"
            )
        self._taken = []
        for number, place in places.items():
            group = self._groups[number]
            kept = group if names is None else {}  # older versions did not save all settings
            self._taken.append((group, kept | self._decoded(group, groups[place])))

    def _places(self, path: str, names: list[list[str]], settings: list[str]) -> dict[int, int]:
        """By number of a group here the number of the settings that it takes. Those of which nothing is there keep theirs."""
        place = {name: number for number, its in enumerate(names) for name in its}
        if self._strict:
            _check_names(path, place, [name for its in self._of_stages for name in chain(*its.values())])
        found: dict[int, int] = {}
        taken_by: dict[int, int] = {}
        for number, its in self._names.items():
            name_at = {place[name]: name for name in its if name in place}
            if (num := len({settings[at] for at in name_at})) > 1:
                raise ckpt.CheckpointError(
                    f"{path}: {some(list(name_at.values()))}, whose settings differ there, are in one parameter group here, in "
                    f"{num} there; {_REMEDY}"
                )
            for at in name_at:
                if taken_by.setdefault(at, number) != number:
                    raise ckpt.CheckpointError(
                        f"{path}: {some(names[at])} are in one parameter group there, in several here; {_REMEDY}"
                    )
            if name_at:
                found[number] = min(name_at)
        return found | self._places_of_empty(place, names, settings)

    def _places_of_empty(self, place: Mapping[str, int], names: list[list[str]], settings: list[str]) -> dict[int, int]:
        """The same of the groups without parameters. One may have its parameters on other stages; else the order decides."""
        empty = [number for number, its in self._names.items() if not its]
        found: dict[int, int] = {}
        for number in empty:
            its = {place[name] for others in self._of_stages for name in others.get(number, ()) if name in place}
            if len({settings[at] for at in its}) == 1:
                found[number] = min(its)
        here = [number for number in empty if number not in found]
        there = [at for at, its in enumerate(names) if not its]
        return found | (dict(zip(here, there, strict=True)) if len(here) == len(there) else {})

    def take(self) -> None:
        """Give the groups the settings that `begin` found."""
        for group, settings in self._taken:
            for key in [key for key in group if key not in settings and key not in _OWN]:
                del group[key]
            group.update(settings)
        self._taken = []

    def _decoded(self, group: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        device = next((param.device for param in group["params"]), torch.device("cpu"))
        settings = {}
        for key, value in saved.items():
            settings[key] = decoded(value, lambda each: small_tensor(each, device))
            if isinstance(group.get(key), torch.Tensor):  # groups may share a tensor that a scheduler writes to
                settings[key] = self._shared.setdefault((id(group[key]), json.dumps(value)), settings[key])
        return settings


def _text(key: Any, number: int) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the optimizer's group {number} has the key {key!r}; a checkpoint keeps only text as keys")
    return key


def _check_names(path: str, place: Mapping[str, int], every_name: Sequence[str]) -> None:
    """CheckpointError if the optimizers there and here are not for the same parameters."""
    here = set(every_name)
    if new := [name for name in every_name if name not in place]:
        raise ckpt.CheckpointError(
            f"{path}: the optimizer there does not have {some(new)}; make the optimizer for the same parameters; or pass "
            "strict=False to keep their state, or hyperparameters=False to keep the settings of all"
        )
    if lacking := [name for name in place if name not in here]:
        raise ckpt.CheckpointError(
            f"{path}: the optimizer here does not have {some(lacking)}, which the one there has; make the optimizer for the same "
            "parameters, or pass strict=False"
        )
