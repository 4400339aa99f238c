"""The settings of an optimizer's groups (lr, betas, initial_lr, ...) in a checkpoint.

The meta has the settings of each group as JSON (plain_values.py), and beside them the names of its parameters. A load finds the group
of a parameter by its name. So groups may be in another order, and a stage of a pipeline may have only some of a group's parameters.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt.convert.formats.safetensors import some
from collectives import Communicator
from mpitrain.weights.plain_values import decoded, encoded, small_tensor
from mpitrain.weights.saved import There

_OWN = ("params", "param_names")
"""What a group has of its own, and never takes from a checkpoint."""

_REMEDY = "make the same groups, or pass hyperparameters=False to keep the settings of those here"


class SavedGroups:
    """The groups of `optimizer`, whose parameters have `names`. `stages`: the ranks of the pipeline, or None.

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
        self._groups, self._names, self._strict = optimizer.param_groups, names, strict
        self._stages = stages if stages is not None and stages.size > 1 else None
        self._taken: list[
            tuple[dict[str, Any], dict[str, Any], bool]
        ] = []  # a group, its settings, whether it has no others
        self._shared: dict[tuple[int, str], Any] = {}

    def settings(self) -> list[dict[str, Any]]:
        """The settings of this rank's groups as JSON. TypeError for one that a checkpoint cannot keep."""
        return [
            {
                _text(key, number): encoded(value, f"{key!r} of the optimizer's group {number}")
                for key, value in group.items()
                if key not in _OWN
            }
            for number, group in enumerate(self._groups)
        ]

    def meta(self, settings: list[dict[str, Any]]) -> dict[str, Any]:
        """What the checkpoint has of them. Collective over the stages of a pipeline, whose groups become one list."""
        mine = list(zip(settings, self._names_of_groups(), strict=True))
        of_stages = [mine] if self._stages is None else self._stages.all_gather_object(mine)
        merged: dict[tuple[int, str], tuple[dict[str, Any], list[str]]] = {}
        for theirs in of_stages:
            for number, (its, names) in enumerate(theirs):
                merged.setdefault((number, json.dumps(its, sort_keys=True)), (its, []))[1].extend(names)
        found = [merged[key] for key in sorted(merged)]
        return {"groups": [its for its, _ in found], "names": [list(dict.fromkeys(names)) for _, names in found]}

    def begin(self, there: There, every_name: Sequence[str]) -> None:
        """Find the settings that `take` gives to the groups. ckpt.CheckpointError if the groups there are others.

        `every_name`: of the optimizers of all stages.
        """
        saved = there.meta["optimizer"]
        groups, names = saved["groups"], saved.get("names")
        if names is None:  # saved by an older version
            if len(groups) != len(self._groups):
                raise ckpt.CheckpointError(
                    f"{there.path}: the optimizer has {len(groups)} parameter groups there, {len(self._groups)} here; {_REMEDY}"
                )
            self._taken = [self._decoded(*pair, is_all=False) for pair in zip(self._groups, groups, strict=True)]
            return
        place = {name: number for number, its in enumerate(names) for name in its}
        if self._strict:
            _check_names(there.path, place, every_name)
        self._taken = []
        taken_by: dict[int, int] = {}
        for number, (group, its) in enumerate(zip(self._groups, self._names_of_groups(), strict=True)):
            found = {place[name]: name for name in its if name in place}
            if not its and len(groups) == len(self._groups):
                found = {number: ""}  # without names the order decides
            if len(found) > 1:
                raise ckpt.CheckpointError(
                    f"{there.path}: {some(list(found.values()))} are in one parameter group here, in {len(found)} there; {_REMEDY}"
                )
            for which, name in found.items():
                if name and taken_by.setdefault(which, number) != number:
                    raise ckpt.CheckpointError(
                        f"{there.path}: {some(names[which])} are in one parameter group there, in several here; {_REMEDY}"
                    )
                self._taken.append(self._decoded(group, groups[which], is_all=True))

    def take(self) -> None:
        """Give the groups the settings that `begin` found."""
        for group, settings, is_all in self._taken:
            for key in [key for key in group if is_all and key not in settings and key not in _OWN]:
                del group[key]
            group.update(settings)
        self._taken = []

    def _names_of_groups(self) -> list[list[str]]:
        """A load with `only=` or a save of a part knows some of the parameters alone."""
        return [[self._names[param] for param in group["params"] if param in self._names] for group in self._groups]

    def _decoded(
        self, group: dict[str, Any], saved: Mapping[str, Any], *, is_all: bool
    ) -> tuple[dict[str, Any], dict[str, Any], bool]:
        device = next((param.device for param in group["params"]), torch.device("cpu"))
        settings = {}
        for key, value in saved.items():
            settings[key] = decoded(value, lambda each: small_tensor(each, device))
            if isinstance(group.get(key), torch.Tensor):  # groups may share a tensor that a scheduler writes to
                settings[key] = self._shared.setdefault((id(group[key]), json.dumps(value)), settings[key])
        return group, settings, is_all


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
