"""Writes inside of `unshard`: to copies, from which each rank takes its rows, or by mistake to the full parameters themselves."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from collectives import Communicator
from mpitrain.placement.agreement import digest
from mpitrain.sharding.module import ShardedModule
from mpitrain.sharding.setup.readiness import some
from mpitrain.sharding.step.changes import fates_of
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.layout import rows_of
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import diloco_of, root_of, unit_of
from mpitrain.torch_glue.torch_internals import count_writes


class _Member(NamedTuple):
    """A parameter in the block."""

    flat: FlatParameters
    param: ShardedParameter
    shown: nn.Parameter  # the full parameter, or a copy of it
    num_writes: int  # before the block


class BlockEnd(NamedTuple):
    """The end of a block on all ranks of one model."""

    problems: list[str | None]
    """What was wrong, for each rank."""
    written: list[_Member]
    """The parameters that some rank has written to."""
    is_alike: bool
    """Whether all ranks have written to the same ones."""


class ShownParameters:
    """The parameters that a block shows, and the writes to them. `shown`: full parameters, or copies of them, by parameter."""

    def __init__(self, parts: Sequence[ShardedModule], shown: Mapping[ShardedParameter, nn.Parameter]) -> None:
        # By the ranks of the whole model: the same lists on all of these.
        self.models: dict[Communicator, list[_Member]] = {}
        for part in parts:
            whole = unit_of(root_of(part))
            assert whole is not None
            its = self.models.setdefault(whole.ranks.data_parallel, [])
            for flat in part._unit.flats:
                its += [_Member(flat, p, shown[p], count_writes([shown[p]])) for p in flat.params]
        self._shards = self._count_shards()

    def _count_shards(self) -> int:
        return count_writes(each.param.shard for its in self.models.values() for each in its)

    def problem(self) -> str | None:
        """What this rank must not do in the block, and has done."""
        members = [each for its in self.models.values() for each in its]
        moved = {param for flat in {each.flat for each in members} for param in flat.put_back()}
        for _, param, shown, _ in members:
            is_shown = all(module._parameters.get(name) is shown for module, name in param.users)
            if not is_shown or param in moved or shown.shape != param.full.shape:
                return f"parameter {param.name} was replaced; write into it instead (with torch.no_grad(): param.copy_(...))"
        if self._count_shards() != self._shards:
            return "shards were written (by an optimizer, an EMA, a load), which must be done outside of the block"
        return None

    def end(self, problem: str | None) -> list[BlockEnd]:
        """Compare the ranks at the end of the block. Collective."""
        found = []
        for comm, its in self.models.items():
            written = [number for number, each in enumerate(its) if count_writes([each.shown]) != each.num_writes]
            of_ranks = comm.all_gather_object((problem, written))
            anywhere = sorted(set.union(*(set(numbers) for _, numbers in of_ranks)))
            is_alike = all(numbers == written for _, numbers in of_ranks)
            found.append(BlockEnd([text for text, _ in of_ranks], [its[number] for number in anywhere], is_alike))
        return found


def check_problems(ended: BlockEnd) -> None:
    """RuntimeError on all ranks if something was wrong on one of them."""
    for rank, problem in enumerate(ended.problems):
        if problem is not None:
            raise RuntimeError(f"unshard: on rank {rank}: {problem}")


def check_unwritten(ended: BlockEnd) -> None:
    """RuntimeError on all ranks if full parameters were written. It says for each whether its values are damaged."""
    if not ended.written:
        return
    fates = fates_of((each.param, each.flat.storage.in_place) for each in ended.written)
    raise RuntimeError(
        f"parameters were written inside `with mpitrain.unshard(model)`, which is for reading. {fates}. Write inside `with "
        "mpitrain.unshard(model, write=True)`, or to the shards outside of the block"
    )


@contextmanager
def copies_to_write(parts: Sequence[ShardedModule]) -> Iterator[None]:
    """In the block the modules show copies of their full parameters. At the end each rank writes its rows back. Collective.

    RuntimeError on all ranks, and no write, if the block has failed on some rank, or if ranks have not made the same writes.
    """
    for step in {part._step for part in parts if part._step is not None}:
        step.end_fence()
        step.end_graph()
    copies: dict[ShardedParameter, nn.Parameter] = {}
    for part in parts:
        copies |= part._unit.show_copies()
    for copy in copies.values():
        if copy.requires_grad:
            copy.register_post_accumulate_grad_hook(_refuse_gradient)
    shown = ShownParameters(parts, copies)
    problem: str | None = None
    try:
        yield
        problem = shown.problem()
    except BaseException as error:
        problem = f"the block ended with {type(error).__name__}, and nothing was written"
        raise
    finally:
        ended = shown.end(problem)
        for part in parts:
            part._unit.reshard()
    is_apart = any(diloco.is_apart for part in parts if (diloco := diloco_of(root_of(part))) is not None)
    for (comm, its), end in zip(shown.models.items(), ended, strict=True):
        check_problems(end)
        _check_same_writes(comm, its, end, is_apart=is_apart)
    for its, end in zip(shown.models.values(), ended, strict=True):
        _write_back(its, end)


def _refuse_gradient(copy: nn.Parameter) -> NoReturn:
    raise RuntimeError(
        "a backward inside `with mpitrain.unshard(model, write=True)`: its gradients would be lost with the copies; run it outside of "
        "the block, or inside `with mpitrain.unshard(model)`"
    )


def _check_same_writes(comm: Communicator, members: Sequence[_Member], ended: BlockEnd, *, is_apart: bool) -> None:
    """RuntimeError on all ranks if they have not made the same writes to their copies. Collective over `comm`."""
    if not ended.is_alike:
        names = some([each.param.name for each in ended.written])
        raise RuntimeError(
            f"unshard: only some ranks have written to some of {names}. Each rank would write only its own rows back, so nothing "
            "was written; let all ranks make the same writes"
        )
    if different := _different(comm, members, ended, is_apart=is_apart):
        raise RuntimeError(
            f"unshard: the ranks have written different values to {some(different)}. Each rank would write only its own rows back, "
            "so nothing was written; let one rank make the values and broadcast them (comm.broadcast), or use one seed on all"
        )


class _Copy(NamedTuple):
    """What a rank has in the place of a parameter."""

    replica: int  # of the shards
    values: str
    is_written: bool


def _different(comm: Communicator, members: Sequence[_Member], ended: BlockEnd, *, is_apart: bool) -> list[str]:
    """The names of the written parameters whose copies differ between ranks that hold the same parameter. Collective over `comm`.

    Values are compared, because writes through `.data` are not counted. `is_apart`: the copies of the model differ, between two outer
    steps of `DiLoCo`.
    """
    counted = set(map(id, ended.written))
    groups: dict[Communicator, list[_Member]] = {}
    for each in members:
        ranks = each.param.ranks
        groups.setdefault(ranks.within if is_apart else ranks.data_parallel, []).append(each)
    found: set[str] = set()
    for group, its in groups.items():
        mine = [
            _Copy(each.param.ranks.replicate.rank, digest(each.shown), id(each) in counted or _has_other_rows(each))
            for each in its
        ]
        for each, *theirs in zip(its, *group.all_gather_object(mine), strict=True):
            # Copies of the shards may have come apart in their last bits. Those of one gather differ only if a rank has written.
            gathers = {copy.replica for copy in theirs}
            is_written = any(copy.is_written for copy in theirs) or len({copy[:2] for copy in theirs}) > len(gathers)
            if is_written and len({copy.values for copy in theirs}) > 1:
                found.add(each.param.name)
    return sorted(set().union(*comm.all_gather_object(found)))


def _rows(member: _Member) -> torch.Tensor:
    """This rank's rows of a copy."""
    shard = member.param.shard
    return rows_of(member.shown.detach(), member.param.box).to(shard.device)


def _has_other_rows(member: _Member) -> bool:
    return not torch.equal(_rows(member), member.param.shard)


@torch.no_grad()
def _write_back(members: Sequence[_Member], ended: BlockEnd) -> None:
    """Write this rank's rows of the copies to its shards."""
    counted = set(map(id, ended.written))
    for each in members:
        shard = each.param.shard
        shard.requires_grad_(each.shown.requires_grad)
        # Other shards keep their counter: those from the meta device would seem to have values.
        if id(each) in counted or _has_other_rows(each):
            shard.copy_(_rows(each))
