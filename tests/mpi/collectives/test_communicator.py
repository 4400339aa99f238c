"""Groups of ranks, messages between two, control messages, and errors: local ones before anything is sent, joint ones on all."""

import re
import socket
import time
from collections.abc import Callable
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import Communicator, Mesh, on_all_ranks
from collectives.communicator import start
from collectives.diagnosis import record
from collectives.selection.table import Table, TableEntry

# Groups


def test_rank_size_and_node(comm: Communicator) -> None:
    assert (comm.rank, comm.size) == (comm.mpi.rank, comm.mpi.size)
    hosts = comm.mpi.allgather(socket.gethostname())
    mine = hosts[comm.rank]
    assert comm.num_nodes == len(set(hosts))
    assert (comm.node.rank, comm.node.size) == (hosts[: comm.rank].count(mine), hosts.count(mine))
    assert comm.node.node is comm.node
    assert repr(comm) == f"Communicator(rank={comm.rank}, size={comm.size}, num_nodes={len(set(hosts))})"


def test_split_groups_by_color_in_order_of_key(comm: Communicator) -> None:
    odd = comm.rank % 2
    group = comm.split(odd, key=-comm.rank)
    members = [rank for rank in range(comm.size) if rank % 2 == odd][::-1]
    assert group.all_gather_object(comm.rank) == members
    assert (group.rank, group.size) == (members.index(comm.rank), len(members))
    x = torch.tensor([comm.rank])
    assert group.all_reduce(x).item() == sum(members)
    memory = group.empty(3, torch.float32)
    memory[:] = comm.rank
    algorithm = "shared" if group.num_nodes == 1 else "auto"
    assert group.all_reduce(memory, algorithm=algorithm).tolist() == [sum(members)] * 3
    group.free()


def test_split_takes_numpy_s_integers_and_none_to_stay_out(comm: Communicator) -> None:
    last = comm.size - 1
    group = comm.split(None if comm.rank == last else np.int64(3), key=np.int32(-comm.rank))
    if comm.rank == last:
        assert group is None
    else:
        assert group.all_gather_object(comm.rank) == list(range(last))[::-1]
        group.free()
    for color in (-1, 1 << 40):
        with pytest.raises(
            ValueError, match=f"split: color {color}; expected 0 to 2147483647, or None to be in no new communicator"
        ):
            comm.split(color)
    for wrong in (0.0, "0"):
        with pytest.raises(
            TypeError, match=f"split: color is {wrong!r}, of type {type(wrong).__name__}; expected an int"
        ):
            comm.split(wrong)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"split: key is 1.5, of type float; expected an integer"):
        comm.split(0, 1.5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"split: key 1099511627776; expected -2147483647 to 2147483647"):
        comm.split(0, 1 << 40)
    assert comm.all_reduce(np.ones(1)).tolist() == [comm.size], "nothing was sent"


def factors(n: int) -> list[dict[str, int]]:
    return {
        1: [{"dp": 1}, {"dp": 1, "tp": 1}],
        2: [{"dp": 2}, {"dp": 1, "tp": 2}, {"dp": -1, "tp": 1}],
        3: [{"dp": 3, "tp": 1}, {"pp": 1, "dp": -1, "tp": 1}],
        4: [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": -1, "tp": 1}],
    }[n]


def test_mesh_axes_are_groups_and_the_last_one_is_of_neighbours(comm: Communicator) -> None:
    for axes in factors(comm.size):
        mesh = Mesh(comm, axes)
        assert list(mesh.axes) == list(axes)
        grid = np.arange(comm.size).reshape(list(mesh.axes.values()))
        assert grid[tuple(mesh.coordinates.values())] == comm.rank
        for axis, name in enumerate(axes):
            # along one axis the other coordinates stay
            place: list[Any] = list(mesh.coordinates.values())
            place[axis] = slice(None)
            assert mesh[name].all_gather_object(comm.rank) == grid[tuple(place)].tolist()
            assert mesh[name].rank == mesh.coordinates[name]
        assert repr(mesh) == f"Mesh({', '.join(f'{name}={size}' for name, size in mesh.axes.items())})"
        with pytest.raises(KeyError, match=f"mesh has no axis 'x'; its axes are {', '.join(axes)}"):
            mesh["x"]
        mesh.free()


def test_products_of_axes_are_made_with_the_mesh(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in product((1, 2, 3), repeat=4):
        if prod(sizes) != comm.size:
            continue
        mesh = Mesh(comm, dict(zip("abcd", sizes, strict=True)))
        grid = np.arange(comm.size).reshape(sizes)
        made = set()
        with monkeypatch.context() as patched:
            patched.setattr(Communicator, "split", None)  # a look-up makes nothing
            patched.setattr(Communicator, "_like_this", None)
            groups = {names: mesh[names] for count in range(5) for names in combinations("abcd", count)}
        for names, group in groups.items():
            place = tuple(slice(None) if name in names else i for name, i in mesh.coordinates.items())
            assert group.all_gather_object(comm.rank) == grid[place].reshape(-1).tolist()
            made.add(group)
        assert mesh["a", "b", "c", "d"] is comm and mesh["a"] is mesh["a",]
        longer = [size for size in sizes if size > 1]
        assert len(made) == 2 ** len(longer) <= comm.size  # the same ranks have one communicator
        mesh.free()
        assert all(group.is_freed for group in made - {comm}) and not comm.is_freed
        mesh.free()


def test_two_meshes_of_the_same_ranks(comm: Communicator) -> None:
    dense = Mesh(comm, {"dp_shard": -1, "cp": 1})
    experts = Mesh(comm, {"dp_shard": 1, "ep": -1})
    assert dense["dp_shard", "cp"] is experts["dp_shard", "ep"] is comm
    assert (experts["dp_shard"].size, experts["ep"].size) == (1, comm.size)
    experts.free()
    assert dense["cp"].all_gather_object(comm.rank) == [comm.rank]
    dense.free()


def test_axes_that_a_mesh_does_not_have_and_products_in_another_order(comm: Communicator) -> None:
    mesh = Mesh(comm, {"pp": 1, "dp": -1, "cp": 1})
    for names, text in [
        ("x", "mesh has no axis 'x'; its axes are pp, dp, cp"),
        (("dp", "x"), "mesh has no axis 'x'; its axes are pp, dp, cp"),
        (0, "mesh has no axis 0; its axes are"),
        (("dp", "dp"), r"mesh axes \('dp', 'dp'\): expected each once and in the order of the mesh: mesh\['dp'\]"),
        (
            ("cp", "pp"),
            r"mesh axes \('cp', 'pp'\): expected each once and in the order of the mesh: mesh\['pp', 'cp'\]",
        ),
    ]:
        with pytest.raises(KeyError) as raised:
            mesh[names]  # type: ignore[index]
        assert re.search(text, raised.value.args[0])
    mesh.free()


def test_meshes_that_differ_between_ranks_are_an_error_on_all(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("ranks that differ")
    last = comm.rank == comm.size - 1
    for usual, other in [({"a": 1, "b": -1}, {"b": -1, "a": 1}), ({"a": 1, "b": -1}, {"a": -1, "b": 1})]:
        with pytest.raises(
            ValueError, match=r"rank 0 has Mesh\(a=1, b=.*rank .* has .*; expected the same axes in the same order"
        ):
            Mesh(comm, other if last else usual)
    with pytest.raises(ValueError, match=f"mesh a={comm.size + 1} makes {comm.size + 1} ranks"):
        Mesh(comm, {"a": comm.size + last})
    comm.barrier()


def test_mesh_that_does_not_fit_shows_every_factor(comm: Communicator) -> None:
    n = comm.size
    for axes, text in [
        ({"dp": 2, "tp": n}, f"mesh dp=2 x tp={n} makes {2 * n} ranks, but the communicator has {n}"),
        ({"dp": -1, "tp": n + 1}, f"mesh dp=-1 x tp={n + 1} makes {n + 1} ranks, but the communicator has {n}"),
        ({"dp": 0}, "mesh dp=0: expected whole numbers of at least 1, of which one may be -1"),
        ({"dp": -1, "tp": -1}, "mesh dp=-1 x tp=-1: expected whole numbers of at least 1"),
        ({}, r"mesh \(no axes\): expected whole numbers"),
        ({"dp": float(n)}, f"mesh dp={n}.0: expected whole numbers of at least 1, of which one may be -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            Mesh(comm, axes)


# Two nodes


@pytest.mark.one_node
def test_on_several_nodes_memory_is_the_node_s_and_collectives_reach_all(
    comm: Communicator, two_nodes: Communicator
) -> None:
    if comm.size == 1:
        pytest.skip("two nodes need two ranks")
    two = two_nodes
    members = list(range(comm.rank % 2, comm.size, 2))
    assert (two.num_nodes, two.node.size) == (2, len(members))
    with pytest.raises(ValueError, match=rf"shared: these {comm.size} ranks are on 2 nodes; call comm.node.shared"):
        two.shared(4, np.float32)
    mine = two.empty(4, np.float32)  # ordinary memory: reductions on it must still reach the other node
    mine[:] = comm.rank
    assert two.all_reduce(mine).tolist() == [sum(range(comm.size))] * 4
    with pytest.raises(ValueError, match="algorithm 'shared' works within one node, not on 2"):
        two.all_reduce(mine, algorithm="shared")
    of_node = two.node.empty(4, np.float32)
    of_node[:] = comm.rank
    assert two.node.all_reduce(of_node).tolist() == [sum(members)] * 4
    of_node[:] = comm.rank
    assert two.all_reduce(of_node).tolist() == [sum(range(comm.size))] * 4
    whole = two.node.shared(len(members), np.int64)
    two.node.all_gather(whole, np.array([comm.rank]), algorithm="shared")
    assert whole.tolist() == members


# Two ranks


def test_send_and_recv_around_a_ring(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("a message needs two ranks")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for x in (np.arange(5.0) + comm.rank, torch.arange(5, dtype=torch.bfloat16) + comm.rank, np.zeros(0)):
        into = x.clone() if isinstance(x, torch.Tensor) else x.copy()
        # even ranks send first, else all would wait for a receiver
        for turn in range(2):
            if comm.rank % 2 == turn % 2:
                comm.send(x, right, tag=3)
            if left % 2 == turn % 2:
                assert comm.recv(into, left, tag=3) is into
        assert into.tolist() == [value - comm.rank + left for value in x.tolist()]


def test_recv_of_another_size_says_both_and_leaves_the_line_clear(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("a message needs two ranks")
    if comm.rank == 0:
        comm.send(np.arange(3, dtype=np.int32), 1)
        comm.send(np.arange(4, dtype=np.int32), 1)
    elif comm.rank == 1:
        x = np.zeros(4, np.int32)
        with pytest.raises(ValueError, match="recv: rank 0 sent 12 bytes, but x has 16"):
            comm.recv(x, 0)
        assert x.tolist() == [0, 0, 0, 0]
        assert comm.recv(x, 0).tolist() == [0, 1, 2, 3]


def test_peers_and_tags_are_checked(comm: Communicator) -> None:
    x = np.zeros(1)
    for name in ("send", "recv", "isend", "irecv"):
        for peer in (-1, comm.size):
            with pytest.raises(ValueError, match=f"{name}: peer {peer} is outside the {comm.size} ranks"):
                getattr(comm, name)(x, peer)
        for tag in (-1, 1 << 20):
            with pytest.raises(ValueError, match=f"{name}: tag {tag}; expected 0 to 32511"):
                getattr(comm, name)(x, 0, tag)
        for wrong in (0.5, "0", None, True):
            with pytest.raises(TypeError, match=f"{name}: peer {wrong!r}, tag 1; expected two integers"):
                getattr(comm, name)(x, wrong, 1)
            with pytest.raises(TypeError, match=f"{name}: peer 0, tag {wrong!r}; expected two integers"):
                getattr(comm, name)(x, 0, wrong)
        with comm.group(), pytest.raises(TypeError, match=r"x is a builtins.list; expected an array"):
            getattr(comm, name)([1.0], 0)


# Control


def test_objects(comm: Communicator) -> None:
    for root in map(np.int64, range(comm.size)):
        assert comm.broadcast_object({"from": comm.rank, "none": None}, root) == {"from": root, "none": None}
    assert comm.all_gather_object((comm.rank, "x")) == [(rank, "x") for rank in range(comm.size)]
    with pytest.raises(ValueError, match=f"broadcast_object: root {comm.size} is outside the {comm.size} ranks"):
        comm.broadcast_object(1, comm.size)
    with pytest.raises(TypeError, match=r"broadcast_object: root is 0.5, of type float; expected an integer"):
        comm.broadcast_object(1, 0.5)  # type: ignore[arg-type]


class AwkwardError(Exception):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first} {second}")


def joint(
    comm: Communicator, error: Exception | None, doing: str = "reading"
) -> tuple[Exception, list[tuple[str, str]]]:
    """The error that leaves `together` on this rank, and everyone's type and text of it."""

    def fail() -> None:
        with comm.together(doing):
            if error is not None:
                raise error

    with pytest.raises(Exception) as caught:
        fail()
    return caught.value, comm.all_gather_object((type(caught.value).__name__, str(caught.value)))


def test_together_raises_one_rank_s_error_on_all(comm: Communicator) -> None:
    last = comm.size - 1
    who = f" [rank {last} of {comm.size}]" if comm.size > 1 else ""
    for kind, text in [(ValueError, "no such column"), (FileNotFoundError, "data.txt"), (MemoryError, "2 GB")]:
        mine = kind(text) if comm.rank == last else None
        error, everyone = joint(comm, mine)
        assert type(error) is kind
        assert everyone == [(kind.__name__, f"reading: {text}{who}")] * comm.size
        assert on_all_ranks(error)
        assert error.__cause__ is mine
    # a type that takes other arguments keeps its name in the text
    error, everyone = joint(comm, AwkwardError("left", 3) if comm.rank == last else None)
    assert everyone == [("RuntimeError", f"AwkwardError: reading: left 3{who}")] * comm.size
    with comm.together("nothing bad"):
        pass


def test_together_with_several_errors_shows_the_first_and_counts_the_others(comm: Communicator) -> None:
    _, everyone = joint(comm, ValueError(f"bad row {comm.rank}"), doing="")
    others = f" (and {comm.size - 1} other error{'s' * (comm.size > 2)})" if comm.size > 1 else ""
    assert everyone == [("ValueError", f"bad row 0{others}")] * comm.size
    _, everyone = joint(comm, OSError("disk full"), doing="")
    assert everyone == [("OSError", "disk full")] * comm.size


def test_an_error_of_some_ranks_only_is_not_on_all_ranks(comm: Communicator) -> None:
    group = comm.split(0 if comm.rank == 0 else 1)
    with pytest.raises(ValueError, match="oops") as caught, group.together():
        raise ValueError("oops")
    # else the ranks outside the group would never hear of it
    assert on_all_ranks(caught.value) == (comm.size == 1)
    assert not on_all_ranks(ValueError("never shared"))
    group.free()


# Local errors: nothing was sent, and the next collective works


@pytest.mark.parametrize("way", ["at once", "asynchronous", "in a group"])
def test_local_errors_are_raised_by_the_call_before_anything_is_sent(comm: Communicator, way: str) -> None:
    n = comm.size
    x, xs = np.zeros(3), np.zeros(3 * n)
    frozen = np.zeros(3 * n)
    frozen.flags.writeable = False
    longer = np.zeros(3 * n + 1)
    beside = longer[3 * comm.rank + 1 :][:3]  # not this rank's place
    cases: list[tuple[type[Exception], str, Callable[..., Any]]] = [
        (TypeError, "x is a builtins.list; expected an array of NumPy, torch", lambda **how: comm.all_reduce([1.0], **how)),
        (TypeError, "dtype object is not supported", lambda **how: comm.all_reduce(x.astype(object), **how)),
        (TypeError, "complex128 is only moved, never reduced; reductions take float64, float32, float16, bfloat16, int64",
         lambda **how: comm.all_reduce(x.astype(complex), **how)),
        (TypeError, "float8_e5m2 is only moved",
         lambda **how: comm.reduce_scatter(x, torch.zeros(3 * n, dtype=torch.float8_e5m2), **how)),
        (TypeError, "complex64 is only moved", lambda **how: comm.reduce(x.astype(np.complex64), op="max", **how)),
        (TypeError, "op 'avg' is not defined for int64", lambda **how: comm.all_reduce(np.arange(3), "avg", **how)),
        (ValueError, "op 'mean' is unknown; expected one of avg, max", lambda **how: comm.all_reduce(x, "mean", **how)),
        (TypeError, "op is of type mpi4py.MPI.Op; expected a string, one of avg, max, min, prod, sum .for MPI.SUM, 'sum'.",
         lambda **how: comm.all_reduce(x, MPI.SUM, **how)),
        (TypeError, "op is of type builtins.list; expected a string", lambda **how: comm.all_reduce(x, ["sum"], **how)),
        (TypeError, "op is of type numpy.ufunc; expected a string", lambda **how: comm.reduce_scatter(x, xs, np.add, **how)),
        (ValueError, "algorithm \\['mpi'\\] is unknown", lambda **how: comm.all_reduce(x, algorithm=["mpi"], **how)),
        (ValueError, "algorithm 'magic' is unknown; expected auto, mpi", lambda **how: comm.all_reduce(x, algorithm="magic", **how)),
        (ValueError, "algorithm 'nccl' works on arrays in GPU memory", lambda **how: comm.all_reduce(x, algorithm="nccl", **how)),
        (ValueError, "reduce: accumulate 'fp64'; expected", lambda **how: comm.reduce(x, accumulate="fp64", **how)),
        (ValueError, "x is not contiguous", lambda **how: comm.all_reduce(np.zeros((3, 2))[:, 0], **how)),
        (ValueError, "x is not contiguous", lambda **how: comm.all_reduce(torch.zeros(3, 2).t(), **how)),
        (ValueError, "x is read-only", lambda **how: comm.all_reduce(frozen, **how)),
        (ValueError, "out is read-only", lambda **how: comm.all_gather(frozen, x, **how)),
        (ValueError, f"root {n} is outside the {n} ranks", lambda **how: comm.broadcast(x, n, **how)),
        (ValueError, "root -1 is outside", lambda **how: comm.reduce(x, -1, **how)),
        (TypeError, "broadcast: root is 0.5, of type float; expected an integer", lambda **how: comm.broadcast(x, 0.5, **how)),
        (TypeError, "broadcast: root is True, of type bool; expected an integer", lambda **how: comm.broadcast(x, True, **how)),
        (TypeError, "reduce: root is False, of type bool; expected an integer", lambda **how: comm.reduce(x, False, **how)),
        (TypeError, "broadcast: root is array.*, of type ndarray; expected", lambda **how: comm.broadcast(x, np.zeros(2, int), **how)),
        (TypeError, "reduce: root is '0', of type str; expected an int", lambda **how: comm.reduce(x, "0", **how)),
        (TypeError, "gather: root is None, of type NoneType; exp", lambda **how: comm.gather(xs, x, None, **how)),
        (TypeError, "scatter: root is 0.0, of type float; expected", lambda **how: comm.scatter(x, xs, 0.0, **how)),
        (TypeError, "all_gather: counts is .*; expected integers, the number of elements of each rank",
         lambda **how: comm.all_gather(xs, x, counts=np.full(n, 3.0), **how)),
        (TypeError, "all_gather: counts is 3; expected integers", lambda **how: comm.all_gather(xs, x, counts=3, **how)),
        (TypeError, "reduce_scatter: counts is .*; expected integers",
         lambda **how: comm.reduce_scatter(x, xs, counts="3" * n, **how)),
        (ValueError, "one for each rank", lambda **how: comm.reduce_scatter(x, xs, counts=np.full(n, -3), **how)),
        (ValueError, f"and out {3 * n + 1}; expected 3 in x and {3 * n} in out", lambda **how: comm.all_gather(longer, x, **how)),
        (ValueError, "all_gather: x is float32, but out is float64", lambda **how: comm.all_gather(xs, x.astype(np.float32), **how)),
        (ValueError, f"{n + 1} counts, the smallest 3; expected {n} numbers of elements of at least 0, one for each rank",
         lambda **how: comm.all_gather(xs, x, counts=[3] * (n + 1), **how)),
        (ValueError, "one for each rank", lambda **how: comm.reduce_scatter(x, xs, counts=[-3] * n, **how)),
        (ValueError, "reduce_scatter: out has 3 elements and x", lambda **how: comm.reduce_scatter(x, np.zeros(3 * n + 1), **how)),
        (ValueError, "all_gather: x overlaps out, but is not rank", lambda **how: comm.all_gather(longer[:-1], beside, **how)),
        (ValueError, "reduce_scatter: out overlaps x, but is not", lambda **how: comm.reduce_scatter(beside, longer[:-1], **how)),
        (ValueError, "all_to_all: x and out overlap", lambda **how: comm.all_to_all(xs, xs, **how)),
        (ValueError, "only one of send_counts and recv_counts",
         lambda **how: comm.all_to_all(xs.copy(), xs, send_counts=[3] * n, **how)),
        (TypeError, "send_counts is .*; expected integers",
         lambda **how: comm.all_to_all(x.copy(), x, send_counts=3, recv_counts=3, **how)),
        (ValueError, f"recv_counts has {n} numbers, the smallest 2, with the sum {2 * n}; expected {n} numbers of at least 0",
         lambda **how: comm.all_to_all(xs.copy(), xs, send_counts=[3] * n, recv_counts=[2] * n, **how)),
        (ValueError, "all_to_all: x has 3 elements of float64, out", lambda **how: comm.all_to_all(np.zeros(n + 3), x, **how)),
    ]  # fmt: skip
    comm.broadcast(x, 0)
    comm.broadcast(x, 1 % n)  # plans, which True and False must not be taken for
    for kind, text, call in cases:
        with pytest.raises(kind, match=text) as caught:
            call()
        if way == "asynchronous":
            with pytest.raises(kind, match=f"^{re.escape(str(caught.value))}$"):
                call(async_op=True)
        elif way == "in a group":
            with comm.group(), pytest.raises(kind, match=f"^{re.escape(str(caught.value))}$"):
                call()
        # every rank made the same mistake; none of them has left a message behind
        assert not comm._queue.progress.pending()
        assert comm.all_reduce(np.ones(2)).tolist() == [n, n]


def test_arguments_of_arrays_of_the_node_are_checked(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"empty: shape \(-1,\); expected lengths of at least 0"):
        comm.empty(-1, np.float32)
    with pytest.raises(TypeError, match=r"dtype \|S3 is not supported"):
        comm.node.shared(3, np.dtype("S3"))


def test_a_root_is_an_integer_of_any_library(comm: Communicator) -> None:
    """Also where the call has a plan: none is made for each array that holds the number."""
    last = comm.size - 1
    x = np.zeros(3)
    for root in (last, np.int64(last), np.array(last), torch.tensor(last)) * 3:
        x[:] = comm.rank
        assert comm.broadcast(x, root).tolist() == [last] * 3
        assert comm.broadcast_object(comm.rank, root) == last
        assert comm.reduce(np.ones(2), root)[0] == (comm.size if comm.rank == last else 1)


def test_a_read_only_array_can_be_given_where_it_is_only_read(comm: Communicator) -> None:
    x = np.arange(3.0)
    if comm.rank == 0:
        x.flags.writeable = False
    assert comm.broadcast(x).tolist() == [0, 1, 2]
    x.flags.writeable = False
    assert comm.all_gather(np.zeros(3 * comm.size), x).tolist() == [0, 1, 2] * comm.size
    assert comm.reduce_scatter(np.zeros(1), np.ones(comm.size)).tolist() == [comm.size]


def test_counts_and_roots_of_numpy_and_torch(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    lengths = list(range(1, n + 1))
    whole = np.repeat(np.arange(n), lengths)
    for counts in (np.array(lengths), np.array(lengths, np.int8), torch.tensor(lengths), tuple(lengths), iter(lengths)):
        assert (comm.all_gather(np.empty(len(whole), int), np.full(rank + 1, rank), counts=counts) == whole).all()
    mine = comm.reduce_scatter(np.empty(rank + 1, int), whole, counts=torch.tensor(lengths), async_op=True).wait()
    assert mine.tolist() == [rank * n] * (rank + 1)
    for root in (np.int32(n - 1), torch.tensor(n - 1)):
        assert comm.broadcast(np.full(3, rank), root).tolist() == [n - 1] * 3
        assert comm.reduce(np.full(3, rank), root)[0] == (sum(range(n)) if rank == n - 1 else rank)
    sending = comm.isend(np.full(3, rank), np.int64(rank), np.int16(7))
    assert comm.irecv(np.empty(3, int), torch.tensor(rank), 7).wait().tolist() == [rank] * 3
    sending.wait()


# Checked mode


@pytest.fixture(scope="module")
def checked(comm: Communicator) -> Communicator:
    return Communicator(comm.mpi.Dup(), checked=True)


@pytest.mark.one_node
def test_checked_mode_lets_right_programs_pass(checked: Communicator) -> None:
    n = checked.size
    x = checked.empty(2 * n, torch.float32)
    x.fill_(1)
    assert checked.all_reduce(x).tolist() == [n] * 2 * n
    assert checked.reduce_scatter(torch.zeros(2), x).tolist() == [n * n] * 2
    whole = checked.shared((n, 2), np.int32)
    assert checked.all_gather(whole, np.full(2, checked.rank, np.int32)).sum() == n * (n - 1)
    group = checked.split(0)
    assert group.checked
    assert group.node.checked
    group.barrier()
    group.free()
    with checked.together("nothing"):
        pass
    assert checked.broadcast_object(checked.rank) == 0
    assert checked.all_gather_object(1) == [1] * n


@pytest.mark.one_node
def test_checked_mode_names_what_differs_between_ranks(checked: Communicator) -> None:
    if checked.size == 1:
        pytest.skip("one rank cannot differ")
    odd = checked.rank == checked.size - 1
    x, y = np.zeros(3), np.zeros(4)
    xs, ys = np.zeros(3 * checked.size), np.zeros(4 * checked.size)
    of_node, other = (checked.empty(4, np.float64) for _ in range(2))
    cases: list[tuple[Any, Any, list[str]]] = [
        # what most ranks do, what the last one does, what the error says
        (lambda: checked.all_reduce(x), lambda: checked.all_reduce(y), ["3 x float64", "4 x float64"]),
        (lambda: checked.all_reduce(x), lambda: checked.all_reduce(x.astype("f4")), ["3 x float64", "3 x float32"]),
        (lambda: checked.all_reduce(x), lambda: checked.all_reduce(x, "max"), ["op=sum", "op=max"]),
        (lambda: checked.all_reduce(x), lambda: checked.all_reduce(x, algorithm="ring"), ["=auto", "=ring"]),
        (lambda: checked.broadcast(x, 0), lambda: checked.broadcast(x, 1), ["root=0", "root=1"]),
        (lambda: checked.all_reduce(x), lambda: checked.broadcast(x), ["all_reduce(3", "broadcast(3"]),
        (lambda: checked.barrier(), lambda: checked.all_reduce(x), ["barrier", "all_reduce"]),
        (lambda: checked.all_gather(xs, x), lambda: checked.all_gather(ys, y), ["counts=(3,", "counts=(4,"]),
        (lambda: checked.all_reduce(y), lambda: checked.all_reduce(of_node), ["in private memory", "in node memory"]),
        (lambda: checked.all_reduce(of_node), lambda: checked.all_reduce(other), ["+ 0 bytes", "+ 0 bytes"]),
        (lambda: checked.all_reduce(of_node[:2]), lambda: checked.all_reduce(of_node[2:]), ["+ 0 bytes", "+ 16 bytes"]),
        (lambda: checked.empty(3, "float32"), lambda: checked.empty(3, "float64"), ["float32", "float64"]),
        (lambda: checked.empty(3, "float32"), lambda: checked.shared(3, "float32"), ["empty((3,)", "shared((3,)"]),
        (lambda: checked.all_gather_object(1), lambda: checked.broadcast_object(1), ["all_gather_object", "broadcast_object"]),
        (lambda: checked.split(0), lambda: checked.together("saving"), ["split", "together"]),
    ]  # fmt: skip
    for most, one, texts in cases:
        with pytest.raises(ValueError, match="the ranks call different collectives, or the same with diff") as caught:
            (one if odd else most)()
        text = str(caught.value)
        assert on_all_ranks(caught.value)
        assert len(set(checked.mpi.allgather(text))) == 1, "the same text on all ranks"
        _, first, second = text.splitlines()
        assert first.startswith(f"  rank {', '.join(map(str, range(checked.size - 1)))}: ")
        assert second.startswith(f"  rank {checked.size - 1}: ")
        assert texts[0] in first, text
        assert texts[1] in second, text
        assert "test_communicator.py:" in first, "the call site"
        assert "test_communicator.py:" in second
    # and nothing was sent: the next one works
    assert checked.all_reduce(np.ones(1)).tolist() == [checked.size]


def test_checked_mode_numbers_the_calls_of_each_communicator(checked: Communicator) -> None:
    if checked.size == 1:
        pytest.skip("one rank cannot differ")
    group = checked.split(0)
    group.barrier()
    checked.barrier()
    with pytest.raises(ValueError, match=r"\n  rank .*#2 barrier  at ") as caught:
        group.barrier() if group.rank == 0 else group.all_gather_object(1)
    assert "#2 all_gather_object" in str(caught.value)
    assert group.all_reduce(np.ones(1)).tolist() == [group.size]
    group.free()


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_checked_mode_waits_for_a_rank_that_is_slow(checked: Communicator) -> None:
    """Longer than the time after which the monitors look for ranks in different orders; not an error."""
    group = checked.split(0)
    for slow in range(min(2, checked.size)):
        if checked.rank == slow:
            time.sleep(1.5)
        assert checked.all_reduce(np.ones(1)).tolist() == [checked.size]
        group.barrier()
    group.free()


def test_checked_mode_by_the_environment(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MPITRAIN_DEBUG", value)
        other = Communicator(comm.mpi.Dup())
        assert other.checked == other.node.checked == expected
        other.free()


# The table that "auto" chooses from


def test_the_record_shows_the_wait_for_rank_0_s_table(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(mpi, name)

        def bcast(self, *args: Any) -> Any:
            waits.extend(str(each.log) + each.call for each in record.open_operations())
            return mpi.bcast(*args)

    waits: list[str] = []
    part = comm.split(0)
    mpi, log = part.mpi, str(part._recorder.log)
    monkeypatch.setattr(part, "mpi", Watched())
    part.use_table(part.table)
    start._measured_table(part)
    assert len(waits) == min(comm.size, 2)  # a rank alone reads no file
    assert waits[0].startswith(log) and waits[0].endswith("use_table(root=0)")
    assert waits[1:] in ([], [f"world() {log[log.index('(') :]}#1 the measured table(root=0)"])
    part.free()


def test_a_table_is_given_to_all_ranks_alike(comm: Communicator) -> None:
    mine = comm.split(0)
    before = mine.table
    table = Table((TableEntry("broadcast", "native", "private", 2, 1, ((100, "tree"), (None, "mpi"))),))
    mine.use_table(table.to_dict())
    assert mine.table == mine.node.table == table
    assert mine.split(comm.rank % 2).table == table
    assert comm.table == before, "the parent keeps its own"
    x = mine.broadcast(np.full(3, comm.rank))
    assert x.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"^use_table: table: 7; expected an object with version and entries$"):
        mine.use_table(7)  # type: ignore[arg-type]
    if comm.size > 1:
        with pytest.raises(
            ValueError, match=rf"use_table: the table differs from rank 0's.* \[rank {comm.size - 1} of"
        ):
            mine.use_table(table if comm.rank < comm.size - 1 else before)
        with pytest.raises(ValueError, match=rf"use_table: table: version 0; expected 2 \[rank 1 of {comm.size}\]"):
            mine.use_table({"version": 0} if comm.rank == 1 else table)
    assert mine.table == mine.node.table == table
    mine.use_table(before)
    assert mine.table == before


def test_a_table_is_given_to_all_that_work_for_a_communicator(two_nodes_flying: Communicator) -> None:
    """The twin for the progress thread, and its ranks of one number on the nodes, which carry out "two_level"."""
    comm, before = two_nodes_flying, two_nodes_flying.table
    x = np.ones(64)
    if "two_level" in comm.algorithms("all_reduce"):
        comm.all_reduce(x, algorithm="two_level", async_op=True).wait()
    else:
        comm.all_reduce(x, async_op=True).wait()
    assert (x == comm.size).all()

    def workers(of: Communicator) -> list[Communicator]:
        return [each for other in of._relatives for each in (other, *workers(other))]

    table = Table((TableEntry("broadcast", "native", "private", 2, 1, ((100, "tree"), (None, "mpi"))),))
    comm.use_table(table)
    assert len(workers(comm)) >= (5 if "two_level" in comm.algorithms("all_reduce") else 3)
    assert all(each.table == table for each in (comm, *workers(comm)))
    comm.use_table(before)


def test_a_wait_by_other_means_than_mpi_is_in_the_record(comm: Communicator) -> None:
    peer, seen = (comm.rank + 1) % comm.size, []

    def wait() -> None:
        seen.extend(each for each in record.open_operations() if each.op == 77)

    comm.expect(peer, 77, wait)
    assert [(each.name, each.root) for each in seen] == [("recv", peer)]
    assert [each for each in record.open_operations() if each.op == 77] == []
