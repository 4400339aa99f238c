"""Local SGD and DiLoCo: the copies of a model train apart for some steps, then an outer step brings them together.

In a local step the gradients are averaged over the ranks of one copy, and no message goes from one copy to another. After `every`
steps the copies average how far they have gone from the outer parameters. An outer optimizer takes this mean as a gradient, and all
copies go on from its result. The optimizer's state stays with each copy.

- Stich, "Local SGD converges fast and communicates little", ICLR 2019 (arXiv 1805.09767): the outer step is the plain mean.
- Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020 (1808.07217): exact steps come first (post-local SGD).
- Douillard et al., "DiLoCo: distributed low-communication training of language models" (2311.08105): AdamW in each copy, and SGD with
  Nesterov momentum outside.
"""

import logging
import math
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from mpitrain.placement.agreement import check_alike
from mpitrain.placement.marks import is_ignored, mark_apart, mark_ignored
from mpitrain.sharding.local.outer import OuterParameters
from mpitrain.sharding.module import steps_of
from mpitrain.sharding.swapping import swap_values
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.unit import compression_of, diloco_of, sharded_over, slices_of, units_of

_log = logging.getLogger("mpitrain")


class DiLoCo:
    """The local steps and the outer steps of a model with several copies. All methods but the attributes are collective.

        mesh = mpitrain.mesh(dp_replicate=2)
        mpitrain.fully_shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        diloco = mpitrain.DiLoCo(model, every=10, exact_steps=50)
        ...
        optimizer.step(); diloco.step()  # True while all copies are the same: in exact steps, and after an outer step
        with diloco.swapped():
            evaluate(model)
        mpitrain.save(path, model, optimizer)  # and load: both find the local steps through the model

    Make it after `fully_shard` and before the first step of the optimizer, when the model has its values; or call `restart`, or load a
    checkpoint, before the first step. The copies are those of the mesh's axis `dp_replicate`. In stage 0 without a mesh each rank is a
    copy. The mean over copies is sent in the `wire` of `fully_shard`. The outer parameters and their momentum have the same bits in all
    copies. They need as much memory as two more shards of the parameters (`outer="mean"`: one).

    After a change of `requires_grad`, or to go on with other settings, make another one while all copies are the same, before the next
    step. It takes the place of the first, with its number of steps and its momentum.

    Args:
        every: the number of inner steps between two outer steps (H of the papers).
        outer: "nesterov": SGD with Nesterov momentum. "mean": the mean of the copies, without `lr` and `momentum`.
        lr, momentum: of Nesterov's; None: 1.0 and 0.5.
        exact_steps: so many steps come first in which the gradients are averaged over all copies, as without this class. They count
            from the beginning of the training: a load goes on with the number in the checkpoint, and begins with 0 if it has none.

    Raises:
        TypeError: the model is not sharded, or an argument has another type.
        ValueError: on all ranks: an argument is out of range, or other on another rank; the model has a `compress_gradients`, which
            would average the gradients of local steps over all copies; its copies differ by local steps of another DiLoCo.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        outer: Literal["nesterov", "mean"] = "nesterov",
        lr: float | None = None,
        momentum: float | None = None,
        exact_steps: int = 0,
    ) -> None:
        ranks = sharded_over(model)
        if ranks is None:
            raise TypeError(f"DiLoCo: this {type(model).__name__} is not sharded; call fully_shard(model, mesh) first")
        before = diloco_of(model)
        with ranks.everyone.together("DiLoCo"):
            _check_arguments(every, outer, lr, momentum, exact_steps)
            if compression_of(model) is not None:
                raise ValueError(
                    "DiLoCo: compress_gradients averages this model's gradients over all copies in each step, so no step would be "
                    "local; expected one of the two"
                )
            if slices_of(model) is not None:
                raise ValueError(
                    "DiLoCo: the model has slices, which make the bits of all ranks' gradients the same; local steps have no such "
                    "gradients; expected one of the two"
                )
            if before is not None and before.is_apart:
                raise ValueError(
                    "DiLoCo: the copies of this model differ, because its DiLoCo has taken local steps; call its outer_step() first"
                )
        lr, momentum = 1.0 if lr is None else lr, 0.5 if momentum is None else momentum
        settings = f"every {every}, outer {outer!r}, lr {lr}, momentum {momentum}, exact_steps {exact_steps}"
        check_alike(ranks.everyone, [settings], caller="DiLoCo", remedy="pass the same arguments on all ranks")
        self._ranks = ranks
        self._model, self._every, self._exact_steps = model, every, exact_steps
        self._lr, self._momentum = (lr, momentum) if outer == "nesterov" else (1.0, 0.0)
        self.num_copies = ranks.across.size
        """The number of copies of the model."""
        self.copy = ranks.across.rank
        """The number of the copy to which this rank belongs."""
        if self.num_copies == 1 and ranks.data_parallel.rank == 0:
            _log.warning(
                "DiLoCo: the model has one copy, so no steps are local; several copies need a mesh with dp_replicate above 1"
            )
        self.num_steps = 0
        """The number of steps so far."""
        self.is_apart: bool = False
        """Whether the copies may differ: a local step has come after the last outer step."""
        self.comm_s = 0.0
        """Seconds that outer steps have taken, with the waits for other copies."""
        self._flats = {flat for unit in units_of(model) for flat in unit.flats if _is_trained(flat)}
        self._outer = [
            OuterParameters(flat.params, flat.ranks, has_momentum=self._momentum > 0)
            for unit in units_of(model)
            for flat in unit.flats
            if flat in self._flats
        ]
        self._is_compared = self._is_swapped = False
        self._names = {param: name for name, param in model.named_parameters()}
        for shard in self.params.values() if self.num_copies > 1 else ():
            mark_apart(shard)  # optimizers divide no work over ranks whose values will differ
        for name, param in model.named_parameters() if self.num_copies > 1 else ():
            if is_ignored(param):
                mark_ignored(param, name, ranks, is_ordered=False, is_apart=True)
        if before is not None:
            self.num_steps = before.num_steps
            for name in self.momentum.keys() & before.momentum.keys():
                self.momentum[name].copy_(before.momentum[name])
        for unit in units_of(model):
            unit.diloco = self
        self._take_phase()

    @property
    def is_local(self) -> bool:
        """Whether the steps are local by now, and not exact ones any more."""
        return self.num_steps >= self._exact_steps

    @property
    def label(self) -> str:
        """What tells this copy's parameters from those of other copies, in names; "" while all copies are the same."""
        return f" of copy {self.copy}" if self.is_local and self.num_copies > 1 else ""

    @property
    def outer(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the outer parameters, by the parameters' names: in exact steps the model's own."""
        if not self.is_local or self._is_swapped:
            return {name: param.detach() for name, param in self.params.items()}
        return self._values

    @property
    def inner(self) -> dict[str, torch.Tensor]:
        """The same of this copy's parameters: the model's own, but within `swapped`."""
        return self._values if self._is_swapped else {name: param.detach() for name, param in self.params.items()}

    @property
    def _values(self) -> dict[str, torch.Tensor]:
        return {self._names[p.shard]: part for each in self._outer for p, part in each.of_params(each.values)}

    @property
    def momentum(self) -> dict[str, torch.Tensor]:
        """The same of the outer optimizer's momentum; empty without one."""
        found = [(each, each.momentum) for each in self._outer if each.momentum is not None]
        return {self._names[p.shard]: part for each, momentum in found for p, part in each.of_params(momentum)}

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The model's shards that have outer values, by name."""
        return {self._names[p.shard]: p.shard for each in self._outer for p, _ in each.of_params(each.values)}

    def step(self) -> bool:
        """Call it after each step of the optimizer, also after a skipped one.

        Returns whether the model has the outer parameters now: in exact steps, and after an outer step.

        ValueError on all ranks if the outer parameters differ between the copies when the first local step ends. RuntimeError if a
        parameter is trained that was frozen when this object was made.
        """
        self._check_thawed()
        was_local = self.is_local
        self.num_steps += 1
        if not was_local:
            if self.is_local:
                self.restart(self.num_steps)
            return True
        if not self._is_compared:
            self._compare()
        self.is_apart = True
        if (self.num_steps - self._exact_steps) % self._every == 0:
            self.outer_step()
        return not self.is_apart

    @torch.no_grad()
    def outer_step(self) -> None:
        """Take an outer step now, unless all copies are the same; for instance after the last step of a run."""
        if not self.is_apart:
            return
        began = time.perf_counter()
        self._prepare_writes()
        for each in self._outer:
            each.step(self._lr, self._momentum)
        self.is_apart = False
        self.comm_s += time.perf_counter() - began

    @torch.no_grad()
    def restart(self, num_steps: int = 0) -> None:
        """Begin anew as after `num_steps` steps, exact ones included, from the values that the model has now, without momentum.

        ValueError on all ranks if the values differ between the copies, as they do after local steps: call `outer_step` first.
        """
        for each in self._outer:
            each.reset()
        self._compare()
        self.num_steps, self.is_apart = num_steps, False
        self._take_phase()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """In the block all copies have the outer parameters. All ranks enter the block together. Do not train in it."""
        if not self.is_apart:
            yield
            return
        params, values = self.params, self._values
        swap_values(params, values)
        self._is_swapped = True
        try:
            yield
        finally:
            swap_values(params, values)
            self._is_swapped = False

    # Checkpoints, for mpitrain.save and mpitrain.load

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on all ranks, for the meta of a checkpoint; the tensors are those of `outer` and `momentum`."""
        local = {"copies": self.num_copies, "is_apart": self.is_apart} if self.is_local else {}
        return {"steps": self.num_steps, **local}

    def load_state_dict(self, state: Mapping[str, Any], names: Container[str] | None = None) -> None:
        """Load the result of `state_dict`. The tensors follow. {}, of a training without local steps: begin with step 0.

        `names`: of the parameters that are loaded; None: all. Others keep their values, their momentum, and their difference between
        the copies; with {} the steps go on, too. ValueError on all ranks if others differ between the copies, and the state is that of
        an exact step.
        """
        taken = {name for name in self.params if names is None or name in names}
        is_part = names is not None and any(self._ranks.everyone.all_gather_object(len(taken) < len(self.params)))
        steps, stay_apart = state.get("steps", self.num_steps if is_part else 0), is_part and self.is_apart
        if stay_apart and steps < self._exact_steps:
            raise ValueError(
                f"DiLoCo: a part of the model is loaded from step {steps}, which is an exact one, and the copies of the rest differ by "
                "local steps; call outer_step() before the load, or load all"
            )
        if is_part and not self.is_local:
            for each in self._outer:  # in exact steps nobody kept the outer values of those that stay
                each.reset()
        self.num_steps = steps
        self.is_apart = self.is_local and (stay_apart or state.get("is_apart", False))
        self._is_compared = False
        for name in taken & self.momentum.keys():
            self.momentum[name].zero_()  # a checkpoint of exact steps has none
        self._take_phase()

    @torch.no_grad()
    def show_outer(self, names: Container[str] | None = None) -> None:
        """Give this copy the outer parameters, in the place of its own. `names`: of some of them; None: all."""
        self._prepare_writes()
        params = self.params
        for name, values in self._values.items():
            if names is None or name in names:
                params[name].copy_(values)

    def _take_phase(self) -> None:
        for unit in units_of(self._model):
            unit.sync_copies = not self.is_local or self.num_copies == 1

    def _prepare_writes(self) -> None:
        shards = list(self.params.values())
        for step in steps_of(self._model):
            step.before_writes(shards, "DiLoCo")

    def _compare(self) -> None:
        """ValueError on all ranks if the outer parameters are not the same in all copies. Collective: 16 bytes for each flat buffer."""
        digests = self._ranks.across.all_gather_object([each.digest() for each in self._outer])
        with self._ranks.everyone.together("DiLoCo"):
            for each, *of_copies in zip(self._outer, *digests, strict=True):
                if len(set(of_copies)) > 1:
                    raise ValueError(
                        f"DiLoCo: {each.name}, or a parameter beside it, differs between the copies; expected copies that are the same "
                        "when local steps begin: call outer_step() before a restart or another DiLoCo, or load a checkpoint"
                    )
        self._is_compared = True

    def _check_thawed(self) -> None:
        for unit in units_of(self._model):
            for flat in unit.flats:
                if flat not in self._flats and _is_trained(flat):
                    raise RuntimeError(
                        f"DiLoCo: {flat.params[0].name}, or a parameter beside it, was frozen when DiLoCo was made, and is trained "
                        "now, so an outer step would leave it out; after a change of requires_grad call outer_step(), and make another "
                        "DiLoCo before the next step"
                    )


def _is_trained(flat: FlatParameters) -> bool:
    return any(param.shard.requires_grad for param in flat.params)


def _check_arguments(every: Any, outer: Any, lr: Any, momentum: Any, exact_steps: Any) -> None:
    for name, value, kind in (
        ("every", every, int),
        ("exact_steps", exact_steps, int),
        ("lr", lr, int | float),
        ("momentum", momentum, int | float),
    ):
        if value is None and name in ("lr", "momentum"):
            continue  # the default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"DiLoCo: {name} is {value!r}; expected {'an int' if kind is int else 'a float'}")
    is_right = every >= 1 and exact_steps >= 0 and outer in ("nesterov", "mean")
    if not (is_right and (lr is None or 0 < lr < math.inf) and (momentum is None or 0 <= momentum < 1)):
        raise ValueError(
            f"DiLoCo: every {every}, exact_steps {exact_steps}, outer {outer!r}, lr {lr}, momentum {momentum}; expected every "
            "from 1, exact_steps from 0, outer 'nesterov' or 'mean', a finite lr above 0, momentum from 0 and below 1"
        )
    if outer == "mean" and (lr is not None or momentum is not None):
        raise ValueError(
            f"DiLoCo: lr {lr}, momentum {momentum} with outer 'mean', which has neither; expected neither of them, or outer 'nesterov'"
        )
