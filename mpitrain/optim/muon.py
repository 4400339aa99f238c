"""Muon, for models whose matrices are whole or spread over ranks, with AdamW for the other parameters.

Muon is of Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Each matrix is whole on one rank during its Newton-Schulz iteration,
and that rank is chosen by the cost of the iteration (as in Distributed Shampoo, Anil et al. 2020, arXiv:2002.09018).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import torch
from torch.optim.adamw import adamw

from collectives import Communicator
from mpitrain.optim.elementwise import adamw_in_whole_vectors
from mpitrain.optim.newton_schulz import COEFFICIENTS, cost, fast_dtype, newton_schulz
from mpitrain.optim.optimizer_checks import check_ranks
from mpitrain.optim.owners import Matrix
from mpitrain.optim.whole_matrices import WholeMatrices
from mpitrain.placement.agreement import check_alike
from mpitrain.placement.marks import pieces_of, spread_of
from mpitrain.torch_glue.uncompiled import Uncompiled

Group = dict[str, Any]

_NS_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_ADJUSTMENTS = ("match_rms_adamw", "original")
_ADJUSTMENTS_OF_TORCH = (None, "original", "match_rms_adamw")


class _Kind(NamedTuple):
    """What matrices that are computed with together have in common. `comm`: the ranks that share the work; None: this rank alone."""

    comm: Communicator | None
    dtype: torch.dtype
    device: torch.device


class Muon(Uncompiled):
    """Muon on matrices, AdamW on the other parameters. Both decay weights apart from the gradient.

    On a model that is sharded, cut or copied, each rank passes its own parameters, and all ranks call `step` together. The result is
    that of whole parameters.

    Args:
        params: parameters, or groups of them. A group may have each setting below, and `use_muon`. True: all its parameters are
            matrices. False: AdamW updates them. None, the default: parameters of two or more dimensions are matrices. Weights of
            convolutions count as matrices (out, the rest). Embeddings and heads do better with AdamW: see
            `mpitrain.models.muon_groups`.
        lr: the learning rate of both.
        weight_decay: of both.
        momentum, nesterov: of the matrices.
        ns_steps: the number of Newton-Schulz steps.
        ns_dtype: the dtype of these steps: torch.bfloat16, torch.float32 or another one, or "auto": bfloat16 on GPUs and on CPUs that
            multiply it fast, float32 on other CPUs. Matrices travel between ranks in it.
        ns_coefficients: the three numbers (a, b, c) of these steps, as of torch.optim.Muon.
        adjust_lr: "match_rms_adamw": updates are as large as those of AdamW, so one lr suits both (Liu et al. 2025). "original":
            they are those of Jordan et al., as by default in torch.optim.Muon.
        adjust_lr_fn: torch's name of `adjust_lr`, in place of it, with torch's values: "match_rms_adamw", "original", or None for
            "original".
        betas, eps: of AdamW.

    Two defaults are not those of torch.optim.Muon, whose `adjust_lr_fn` is "original", and which always computes in bfloat16. Its `eps`
    is the least norm by which a matrix is divided: here that is always 1e-7, its default.

    Raises:
        ValueError: a setting is out of its range, `adjust_lr` and `adjust_lr_fn` contradict each other, or a parameter of a group with
            `use_muon=True` is no matrix.
    """

    handles_shards = True  # see optimizer_checks.py

    _checked: list[int] | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | str = "auto",
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adjust_lr_fn: Literal["match_rms_adamw", "original"] | EllipsisType | None = ...,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "ns_dtype": ns_dtype, "ns_coefficients": ns_coefficients, "adjust_lr": adjust_lr, "betas": betas, "eps": eps,
            "use_muon": None,
        }  # fmt: skip
        if adjust_lr_fn is not ...:
            # The default of `adjust_lr` gives way.
            its_own = {} if adjust_lr == "match_rms_adamw" else {"adjust_lr": adjust_lr}
            defaults["adjust_lr"] = _adjustment(adjust_lr_fn, its_own)
        self._plans: dict[tuple[_Kind, tuple[int, ...]], WholeMatrices] = {}
        self._agreed: dict[Communicator, torch.dtype] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._agreed = {}, {}
        for group in self.param_groups:
            group.setdefault("ns_coefficients", COEFFICIENTS)  # of a state that an older version has saved

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with settings of its own. ValueError as for `Muon`."""
        if isinstance(param_group, dict) and "adjust_lr_fn" in param_group:
            its_own = {name: value for name, value in param_group.items() if name != "adjust_lr_fn"}
            param_group = its_own | {"adjust_lr": _adjustment(param_group["adjust_lr_fn"], its_own)}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["ns_dtype"] = str(group["ns_dtype"]).removeprefix("torch.")  # a checkpoint has a word
        _check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients. Collective over the ranks that train the model. Returns what `closure` returns.

        All ranks have gradients of the same parameters, if only of no rows of them. The ranks of a stage of a pipeline do without
        those of other stages, which may have nothing to train.

        ValueError on all ranks if they have other parameters or settings (see `check_ranks`), or gradients of other matrices.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._checked = check_ranks(self, self._checked)
        matrices: dict[_Kind, list[tuple[torch.Tensor, Group]]] = {}
        for group in self.param_groups:
            others = []
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not _is_matrix(param, group):
                    others.append(param)
                elif prod(_full_shape(param)):
                    kind = self._kind(param, group)
                    matrices.setdefault(kind, []).append((param, group))
            self._update_others(others, group)
        for kind, its in matrices.items():
            self._update_matrices(kind, its)
        return loss

    # Matrices

    def _update_matrices(self, kind: _Kind, params: Sequence[tuple[torch.Tensor, Group]]) -> None:
        grads = [param.grad for param, _ in params]
        momenta, updates = [], []
        for (param, group), grad in zip(params, grads, strict=True):
            assert grad is not None
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
            momenta.append(momentum)
            updates.append(grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)

        def orthogonal(index: int, matrix: torch.Tensor) -> torch.Tensor:
            flat = matrix.reshape(matrix.size(0), -1)
            group = params[index][1]
            made = newton_schulz(flat, group["ns_steps"], kind.dtype, group["ns_coefficients"])
            return made.reshape(matrix.shape)

        results: list[list[tuple[tuple[slice, ...], torch.Tensor]]]
        if kind.comm is None:
            results = [[((slice(None),), orthogonal(i, update.contiguous()))] for i, update in enumerate(updates)]
        else:
            results = self._plan(kind, [param for param, _ in params]).map(updates, orthogonal, kind.dtype)
        for (param, group), its in zip(params, results, strict=True):
            lr = float(group["lr"])
            param.mul_(1 - lr * group["weight_decay"])
            for place, values in its:
                param[place].add_(values, alpha=-_adjusted(lr, group["adjust_lr"], _full_shape(param)))

    def _plan(self, kind: _Kind, params: Sequence[torch.Tensor]) -> WholeMatrices:
        """The work of all ranks on these matrices. Collective for a new choice of matrices."""
        key = kind, tuple(map(id, params))
        if key not in self._plans:
            assert kind.comm is not None
            check_alike(
                kind.comm,
                [f"a gradient of {spread.name}" for param in params if (spread := spread_of(param)) is not None],
                caller="Muon",
                remedy="a matrix needs a gradient on all ranks or on none",
            )
            mine = [pieces_of(param) for param in params]
            shapes = [_full_shape(param) for param in params]
            held = kind.comm.all_gather_object([[piece.box for piece in pieces] for pieces in mine])
            matrices = [
                Matrix(shape, cost(shape[0], prod(shape[1:])), tuple(tuple(boxes[index]) for boxes in held))
                for index, shape in enumerate(shapes)
            ]
            assert all(matrix.is_complete for matrix in matrices)
            self._plans[key] = WholeMatrices(kind.comm, matrices, mine)
        return self._plans[key]

    def _kind(self, param: torch.Tensor, group: Group) -> _Kind:
        spread = spread_of(param)
        comm = None if spread is None or spread.alike.size == 1 else spread.alike
        if group["ns_dtype"] != "auto":
            return _Kind(comm, getattr(torch, group["ns_dtype"]), param.device)
        dtype = fast_dtype(param.device.type)
        if comm is not None:
            if comm not in self._agreed:  # ranks on different CPUs take what is fast on all
                is_fast = all(theirs == torch.bfloat16 for theirs in comm.all_gather_object(dtype))
                self._agreed[comm] = torch.bfloat16 if is_fast else torch.float32
            dtype = self._agreed[comm]
        return _Kind(comm, dtype, param.device)

    # The other parameters

    def _update_others(self, params: Sequence[torch.Tensor], group: Group) -> None:
        """AdamW (Loshchilov and Hutter 2019)."""
        if not params:
            return
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        states = [self.state[param] for param in params]
        on_host = all(param.device.type == "cpu" and param.is_floating_point() for param in params)
        beta1, beta2 = group["betas"]
        update = partial(
            adamw,
            fused=on_host or None,
            has_complex=any(param.is_complex() for param in params),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        grads = [param.grad for param in params if param.grad is not None]
        means = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
        adamw_in_whole_vectors(update, params, [list(params), grads, *means], [state["step"] for state in states])


def _check(group: Group) -> None:
    """ValueError for settings out of their range."""
    for name, least, below in (
        ("lr", 0, math.inf),
        ("weight_decay", 0, math.inf),
        ("momentum", 0, 1),
        ("eps", 0, math.inf),
    ):
        if not least <= group[name] < below:
            raise ValueError(f"Muon: {name} is {group[name]}; expected a number from {least} to below {below}")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"Muon: betas are {group['betas']}; expected two numbers from 0 to below 1")
    if not (isinstance(group["ns_steps"], int) and group["ns_steps"] >= 1):
        raise ValueError(f"Muon: ns_steps is {group['ns_steps']}; expected an integer of at least 1")
    coefficients = group["ns_coefficients"]
    if not (isinstance(coefficients, Sequence) and len(coefficients) == 3 and all(map(_is_finite, coefficients))):
        raise ValueError(f"Muon: ns_coefficients are {coefficients!r}; expected three numbers")
    for name, known in (("ns_dtype", _NS_DTYPES), ("adjust_lr", _ADJUSTMENTS)):
        if group[name] not in known:
            raise ValueError(f"Muon: {name} is {group[name]!r}; expected one of {', '.join(known)}")
    if group["use_muon"]:
        for param in group["params"]:
            if param.ndim < 2 or param.is_complex():
                raise ValueError(
                    f"Muon: a parameter of shape {tuple(param.shape)} and {param.dtype} is in a group with use_muon=True; expected "
                    "real matrices, with two or more dimensions; put others into a group with use_muon=False, for AdamW"
                )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _adjustment(of_torch: object, given: Mapping[str, Any]) -> str:
    """The `adjust_lr` for an `adjust_lr_fn` of torch.optim.Muon. ValueError if it has none, or `given` has another one."""
    if of_torch not in _ADJUSTMENTS_OF_TORCH:
        raise ValueError(f"Muon: adjust_lr_fn is {of_torch!r}; expected None, 'original' or 'match_rms_adamw'")
    found = "original" if of_torch is None else str(of_torch)
    if (other := given.get("adjust_lr", found)) != found:
        raise ValueError(f"Muon: adjust_lr_fn is {of_torch!r}, but adjust_lr is {other!r}; expected one of the two")
    return found


def _is_matrix(param: torch.Tensor, group: Group) -> bool:
    """Whether Muon, and not AdamW, updates a parameter."""
    use_muon = group["use_muon"]
    return param.ndim >= 2 and not param.is_complex() if use_muon is None else use_muon


def _full_shape(param: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter."""
    spread = spread_of(param)
    return tuple(param.shape) if spread is None else spread.full_shape


def _adjusted(lr: float, adjust_lr: str, shape: Sequence[int]) -> float:
    """The learning rate of a matrix (out, in) of this shape."""
    rows, columns = shape[0], prod(shape[1:])
    if adjust_lr == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * 0.2 * math.sqrt(max(rows, columns))
