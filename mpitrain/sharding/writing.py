"""Writes inside of `unshard`: to copies, from which each rank takes its rows, or by mistake to the full parameters themselves."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from collectives import Communicator
from mpitrain.agreement import digest
from mpitrain.sharding.module import ShardedModule
from mpitrain.sharding.setup.readiness import some
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.layout import rows_of
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.registry import diloco_of, root_of, unit_of
from mpitrain.torch_internals import count_writes


class _Member(NamedTuple):
    """A parameter in the block."""

    flat: FlatParameters
    param: ShardedParameter
    shown: nn.Parameter  # the full parameter, or a copy of it
    num_writes: int  # before the block


class Ended(NamedTuple):
    """The end of a block on all ranks of one model."""

    problems: list[str | None]
    """What was wrong, for each rank."""
    written: list[_Member]
    """The parameters that some rank has written to."""
    is_alike: bool
    """Whether all ranks have written to the same ones."""


class Block:
    """The parameters that a block shows, and the writes to them. `shown`: full parameters, or copies of them, by parameter."""

    def __init__(self, parts: Sequence[ShardedModule], shown: Mapping[ShardedParameter, nn.Parameter]) -> None:
        self.models: dict[
            Communicator, list[_Member]
        ] = {}  # by the ranks of the whole model: the same lists on all of these
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
        for param, shown in ((each.param, each.shown) for its in self.models.values() for each in its):
            if any(module._parameters.get(name) is not shown for module, name in param.users):
                return f"parameter {param.name} was replaced; write into it instead (with no_grad: param.copy_(...))"
        if self._count_shards() != self._shards:
            return "shards were written (by an optimizer, an EMA, a load), which must be done outside of the block"
        return None

    def end(self, problem: str | None) -> list[Ended]:
        """Compare the ranks at the end of the block. Collective."""
        found = []
        for comm, its in self.models.items():
            written = [number for number, each in enumerate(its) if count_writes([each.shown]) != each.num_writes]
            of_ranks = comm.all_gather_object((problem, written))
            anywhere = sorted(set.union(*(set(numbers) for _, numbers in of_ranks)))
            is_alike = all(numbers == written for _, numbers in of_ranks)
            found.append(Ended([text for text, _ in of_ranks], [its[number] for number in anywhere], is_alike))
        return found


def check_problems(ended: Ended) -> None:
    """RuntimeError on all ranks if something was wrong on one of them."""
    for rank, problem in enumerate(ended.problems):
        if problem is not None:
            raise RuntimeError(f"unshard: on rank {rank}: {problem}")


def check_unwritten(ended: Ended) -> None:
    """RuntimeError on all ranks if full parameters were written. It says for each whether its values are damaged."""
    if not ended.written:
        return
    names: dict[str, list[str]] = {}
    for flat, param, *_ in ended.written:
        fate = "not damaged, but the new values are lost"
        if flat.storage.in_place and param.ranks.data_parallel.size > 1:
            fate = "damaged, because the writes of several ranks have met, or each has written to its own copy; load these values again"
        elif flat.storage.in_place:
            fate = "not damaged, and this only rank has the new values"
        names.setdefault(fate, []).append(param.name)
    fates = "; ".join(f"{some(its)}: {fate}" for fate, its in names.items())
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
        step.settle()
        step.end_graph()
    copies: dict[ShardedParameter, nn.Parameter] = {}
    for part in parts:
        copies |= part._unit.show_copies()
    for copy in copies.values():
        if copy.requires_grad:
            copy.register_post_accumulate_grad_hook(_refuse_gradient)
    block = Block(parts, copies)
    problem: str | None = None
    try:
        yield
        problem = block.problem()
    except BaseException as error:
        problem = f"the block ended with {type(error).__name__}, and nothing was written"
        raise
    finally:
        ended = block.end(problem)
        for part in parts:
            part._unit.reshard()
    for end in ended:
        check_problems(end)
        if not end.is_alike:
            names = some([each.param.name for each in end.written])
            raise RuntimeError(
                f"unshard: only some ranks have written to some of {names}. Each rank would write only its own rows back, so nothing "
                "was written; let all ranks make the same writes"
            )
    is_apart = any(diloco.is_apart for part in parts if (diloco := diloco_of(root_of(part))) is not None)
    for comm, end in zip(block.models, ended, strict=True):
        if different := _different(comm, end.written, is_apart=is_apart):
            raise RuntimeError(
                f"unshard: the ranks have written different values to {some(different)}. Each rank would write only its own rows back, "
                "so nothing was written; let one rank make the values and broadcast them (comm.broadcast), or use one seed on all"
            )
    for its, end in zip(block.models.values(), ended, strict=True):
        _write_back(its, end, is_apart=is_apart)


def _refuse_gradient(copy: nn.Parameter) -> NoReturn:
    raise RuntimeError(
        "a backward inside `with mpitrain.unshard(model, write=True)`: its gradients would be lost with the copies; run it outside of "
        "the block, or inside `with mpitrain.unshard(model)`"
    )


def _different(comm: Communicator, written: Sequence[_Member], *, is_apart: bool) -> list[str]:
    """The names of the written parameters whose copies differ between ranks that hold the same parameter. Collective over `comm`."""
    groups: dict[Communicator, list[_Member]] = {}
    for each in written:
        ranks = each.param.ranks
        groups.setdefault(ranks.within if is_apart else ranks.data_parallel, []).append(each)
    found: set[str] = set()
    for group, its in groups.items():
        of_ranks = group.all_gather_object([digest(each.shown) for each in its])
        found |= {each.param.name for each, *theirs in zip(its, *of_ranks, strict=True) if len(set(theirs)) > 1}
    return sorted(set().union(*comm.all_gather_object(found))) if written else []


@torch.no_grad()
def _write_back(members: Sequence[_Member], ended: Ended, *, is_apart: bool) -> None:
    """Write this rank's rows of the copies to its shards. Collective.

    `is_apart`: the copies of the model differ, between two outer steps of `DiLoCo`. Otherwise all take the rows of the first one.
    """
    written = set(map(id, ended.written))
    for each in members:
        shard, copy = each.param.shard, each.shown
        shard.requires_grad_(copy.requires_grad)
        rows = rows_of(copy.detach(), each.param.box).to(shard.device)
        # Writes through `.data` are not counted. Other shards keep their counter: those from the meta device would seem to have values.
        if id(each) in written or not torch.equal(rows, shard):
            shard.copy_(rows)
        if id(each) in written and each.param.ranks.replicate.size > 1 and shard.numel() and not is_apart:
            each.param.ranks.replicate.broadcast(shard.detach())
