"""`mpitrain.mesh`: its axes, those of experts among them, are the ranks that they should be."""

from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from sharded_models import assert_same, pair_of
from torch import nn

import mpitrain
from collectives import Communicator, Mesh

pytestmark = pytest.mark.ranks(1, 2, 4)

LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{}, {"ep": 2}, {"cp": 2, "ep": 2}, {"tp": 2}],
    4: [
        {"ep": 2},
        {"ep": 4},
        {"cp": 2, "ep": 2},
        {"cp": 2, "ep": 4},
        {"cp": 4, "ep": 2},
        {"tp": 2, "ep": 2},
        {"pp": 2, "cp": 2, "ep": 2},
        {"dp_replicate": 2, "ep": 2},
        {"tp": 2, "dp_replicate": 2},
    ],
}


def test_each_group_has_the_ranks_of_its_axes(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in LAYOUTS[comm.size]:
        check_groups(comm, given, monkeypatch)


def check_groups(comm: Communicator, given: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ep, *others = (given.get(name, 1) for name in ("ep", "pp", "dp_replicate", "cp", "tp"))
    pp, replicate, cp, tp = others
    mesh = mpitrain.mesh(comm, **given)
    shard = comm.size // prod(others)
    dense = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
    experts = {"pp": pp, "dp_replicate": replicate, "efsdp": shard * cp // ep, "ep": ep, "tp": tp}
    assert (mesh.axes, mesh.experts.axes) == (dense, experts)
    shown = ", ".join(f"{name}={size}" for name, size in dense.items())
    assert repr(mesh) == (f"Mesh({shown}, ep={ep})" if ep > 1 else f"Mesh({shown})")

    groups: dict[Communicator, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr(Communicator, "split", None)  # a look-up makes nothing
        asked = [
            (names, axes) for axes in (dense, experts) for count in range(6) for names in combinations(axes, count)
        ]
        found = [mesh[names] for names, _ in asked]
        assert mesh["ep"] is mesh["ep",]
    for (names, axes), group in zip(asked, found, strict=True):
        grid = np.arange(comm.size).reshape(tuple(axes.values()))
        place = np.unravel_index(comm.rank, grid.shape)
        expected = grid[tuple(slice(None) if name in names else i for name, i in zip(axes, place, strict=True))]
        assert groups.setdefault(group, expected.reshape(-1).tolist()) == expected.reshape(-1).tolist(), names
    for group, ranks in groups.items():
        assert group.all_gather_object(comm.rank) == ranks
    assert len(groups) == len({tuple(ranks) for ranks in groups.values()}), (
        "groups of the same ranks are one communicator"
    )
    assert mesh["efsdp", "ep"] is mesh["dp_shard", "cp"]
    ranks = mesh["ep"].all_gather_object(mesh["dp_shard", "cp"].rank)
    assert ranks == list(range(ranks[0], ranks[0] + ep)), "neighbours"
    mesh.free()
    assert all(group.is_freed for group in groups if group is not comm) and not comm.is_freed


def test_look_ups_that_no_mesh_has(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm, ep=comm.size)
    for names, text in [
        (
            ("cp", "ep"),
            "efsdp x ep divide the ranks of dp_shard x cp in another way; expected axes of one mesh: pp, dp",
        ),
        (("ep", "efsdp"), "expected each once and in the order of the mesh: mesh['efsdp', 'ep']"),
        (("ep", "x"), "mesh has no axis 'x'; its axes are pp, dp_replicate, efsdp, ep, tp"),
    ]:
        with pytest.raises(KeyError) as raised:
            mesh[names]
        assert text in raised.value.args[0]
    mesh.free()


def test_sizes_that_do_not_fit(comm: Communicator) -> None:
    """One error has the products of both meshes and the number of ranks."""
    n = comm.size
    for sizes, text in [
        (
            {"tp": n, "ep": 2},
            f"number of ranks, {n}; got pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp {n} = {n}, "
            f"and for experts pp 1 x dp_replicate 1 x efsdp 1 x ep 2 x tp {n} = {2 * n}; dp_shard=-1 takes",
        ),
        ({"tp": 2 * n, "ep": 3}, f"x tp {2 * n} = {2 * n}, and for experts .* x efsdp 1 x ep 3 x tp {2 * n} = {6 * n}"),
        ({"tp": 3}, "dp_shard 1 x cp 1 x tp 3 = 3, and for experts .* x tp 3 = 3"),
        (
            {"dp_shard": 2 * n, "ep": 2},
            f"x dp_shard {2 * n} x cp 1 x tp 1 = {2 * n}, and for experts .*efsdp {n} x ep 2 x tp 1",
        ),
        (
            {"ep": 3},
            rf"x dp_shard {n} x cp 1 x tp 1 = {n}, and for experts .* x ep 3 x tp 1 = 3; .*ep must divide dp_shard x cp",
        ),
        ({"ep": 0}, "mesh: expected whole numbers of at least 1, and -1 for dp_shard alone; got pp 1"),
        ({"ep": -1}, "cp 1 x tp 1 x ep -1"),
        ({"tp": 0}, "-1 for dp_shard alone; got pp 1 x dp_replicate 1 x dp_shard -1 x cp 1 x tp 0"),
        ({"tp": -1, "dp_shard": 1}, "-1 for dp_shard alone"),
        ({"tp": "1"}, "expected whole numbers"),
    ]:
        with pytest.raises(ValueError, match=text):
            mpitrain.mesh(comm, **sizes)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_an_ep_that_differs_between_ranks(comm: Communicator) -> None:
    with pytest.raises(
        ValueError, match=r"rank 0 has Mesh\(.*tp=1\), rank 1 has Mesh\(.*tp=1, ep=2\); expected the same"
    ):
        mpitrain.mesh(comm, ep=1 + comm.rank)


def test_a_mesh_beside_another(comm: Communicator) -> None:
    """Of groups of the same ranks the second mesh has the first one's communicators, and leaves them when it is freed."""
    first = Mesh(comm, {"a": -1, "b": 1})
    second = Mesh(comm, {"c": 1, "a": -1}, beside=first)
    assert second["a"] is first["a"] and second[()] is first[()] and second["c"] is first["b"]
    other = comm.split(0)
    with pytest.raises(
        ValueError, match=r"Mesh\(a=.*, b=1\) has another communicator; expected a mesh of the same one"
    ):
        Mesh(other, {"a": -1}, beside=first)
    second.free()
    assert not first[()].is_freed
    first.free()
    other.free()


@pytest.mark.ranks(2)
def test_a_sharded_model_on_a_mesh_with_experts(comm: Communicator) -> None:
    """What is no expert is sharded over dp_shard x cp, as without `ep`."""
    mesh = mpitrain.mesh(comm, ep=comm.size)
    model, plain = pair_of(lambda: nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 3)), comm, mesh=mesh)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(torch.arange(12.0).view(3, 4)).square().mean().backward()
        optimizer.step()
    assert_same(model, plain, grads=True, rtol=1e-5, atol=1e-6)
    mesh.free()
