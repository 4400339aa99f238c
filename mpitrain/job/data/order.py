"""The order of the samples: the tokens of a sample are a pure function of (seed, step, index in the global batch).

A sample is a window of `context` tokens, and one more token as the last target. Each epoch has every window once, in another
order. Each epoch also shifts the grid of windows, so that a window's edges differ between epochs. The order is a keyed
permutation that is computed, not stored: a Feistel network over the next power of four, with cycle walking: it is applied
until the image is in range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). So a checkpoint stores
only a position, and any rank finds any sample of any step in constant time and memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mpitrain.job.data.positions import Positions
from mpitrain.job.data.tokens import Tokens

_ROUNDS = 6
"""Rounds of the Feistel network: 4 give a permutation without a visible pattern; 2 more cost little."""

_AT_A_TIME = 1 << 21
"""Images that are computed at a time, in 16 to 64 times as many bytes."""


def permute(indices: np.ndarray, num: int, keys: np.ndarray) -> np.ndarray:
    """Images of some indices under a permutation of [0, num).

    Args:
        indices: integers in [0, num), any shape.
        num: size of the permuted range, 1 to 2**62.
        keys: uint64, one per round; they choose the permutation.

    Returns:
        int64 of the same shape.
    """
    half = np.uint64(max(1, ((num - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)

    def network(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return left << half | right

    if np.size(indices) > _AT_A_TIME:  # the same in less memory
        flat = np.reshape(indices, -1)
        parts = [permute(flat[at : at + _AT_A_TIME], num, keys) for at in range(0, flat.size, _AT_A_TIME)]
        return np.concatenate(parts).reshape(np.shape(indices))
    images = network(np.array(indices, np.uint64).reshape(-1))
    domain = 1 << 2 * int(half)
    # A table of the whole domain, where it is not much more than what is asked for: looking up is faster than computing again.
    table = network(np.arange(domain, dtype=np.uint64)) if domain <= 4 * images.size else None
    while (
        outside := images >= num
    ).any():  # cycle walking: at most 4 tries on average, since the range is 1/4 of the domain or more
        images[outside] = network(images[outside]) if table is None else table[images[outside]]
    return images.astype(np.int64).reshape(np.shape(indices))


def keys_of(*what: object) -> np.ndarray:
    """Keys of `permute`, which depend on the text of `what` alone."""
    text = "/".join(map(str, what)).encode(errors="surrogateescape")
    return np.frombuffer(
        hashlib.blake2b(text, digest_size=8 * _ROUNDS, person=b"mpitrain.stream").digest(), "<u8"
    ).astype(np.uint64)


def sample_starts(positions: np.ndarray, *, seed: int, num_windows: int, context: int, num_shifts: int) -> np.ndarray:
    """The first token of the sample at each of `positions`.

    Args:
        positions: 1-D integers, numbers of samples since the start of the run: step * batch + index.
        seed: the run's seed.
        num_windows: windows per epoch.
        context: tokens from one window to the next.
        num_shifts: the grid of an epoch begins at a token in [0, num_shifts).

    Returns:
        int64, as many as positions.
    """
    positions = np.asarray(positions, np.int64)
    starts = np.empty_like(positions)
    epochs = positions // num_windows
    for epoch in np.unique(epochs):
        here = epochs == epoch
        text = f"{seed}/{epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8 * (_ROUNDS + 1), person=b"mpitrain.order").digest()
        shift, *keys = np.frombuffer(digest, "<u8").astype(np.uint64)
        windows = permute(positions[here] % num_windows, num_windows, np.array(keys))
        starts[here] = windows * context + int(shift) % num_shifts
    return starts


class Batches(Positions):
    """Training batches of a run, without end.

    Args:
        tokens: the training part: 1-D uint8, not copied, or files of tokens.
        context: tokens of a sample that the model sees.
        batch: samples in a global batch.
        seed: the run's seed.

    Few tokens may have fewer windows than a batch: then it has windows of several epochs.

    Raises:
        ValueError: fewer tokens than one window needs.
    """

    def __init__(self, tokens: np.ndarray | Tokens, *, context: int, batch: int, seed: int) -> None:
        _check_tokens(tokens)
        # The length of one window is left for the shifts, unless there is only one window.
        self.num_windows = max(len(tokens) // context - 1, min(1, (len(tokens) - 1) // context))
        if self.num_windows < 1:
            raise ValueError(
                f"data.path: a window of {context} tokens needs {context + 1} training tokens, got {len(tokens)}; take more data, "
                "or lower model.context"
            )
        super().__init__(batch)
        self.tokens, self.context, self.seed = tokens, context, seed
        self.lacks = ""
        """What too few tokens change, as text; else empty."""
        if self.num_windows < batch:
            self.lacks = f"the {batch} windows of a batch overlap in the {len(tokens)} training tokens"
        self._num_shifts = min(context, len(tokens) - self.num_windows * context)

    def get(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """Rows of the global batch of a step (0, 1, ...).

        Returns:
            (rows, context + 1) int64: the tokens that the model sees; the last column has the last targets.
        """
        positions = self.samples(step, _checked(rows, self.batch))
        starts = sample_starts(
            positions,
            seed=self.seed,
            num_windows=self.num_windows,
            context=self.context,
            num_shifts=self._num_shifts,
        )
        return _rows(self.tokens, starts, self.context)


class HeldoutBatches:
    """Batches for evaluation: fixed windows, evenly spaced over the held-out tokens, without overlap.

    All batches are full, so every rank has the same number of rows for any number of ranks. So if there are too few tokens for one
    batch, its windows overlap.

    Args:
        tokens: the held-out part, as in `Batches`.
        context: tokens of a sample that the model sees.
        batch: samples in a global batch.
        num_batches: the requested number of batches; the attribute `num_batches` is lower if there are too few tokens, and 0 if they
            are less than a window and its last target.
    """

    def __init__(self, tokens: np.ndarray | Tokens, *, context: int, batch: int, num_batches: int) -> None:
        _check_tokens(tokens)
        self.tokens, self.context, self.batch = tokens, context, batch
        num_windows = max(len(tokens) - 1, 0) // context
        self.num_batches = min(num_batches, num_windows // batch)
        num = self.num_batches * batch
        self._starts = np.arange(num, dtype=np.int64) * num_windows // max(num, 1) * context
        self.lacks = ""
        """What too few tokens change, as text; else empty."""
        if num_batches and not self.num_batches:
            self.lacks = (
                f"the {len(tokens)} held-out tokens are less than a window of {context}, so there are no evaluations"
            )
            if num_windows:
                self.num_batches = 1
                self._starts = np.arange(batch, dtype=np.int64) * (len(tokens) - 1 - context) // max(batch - 1, 1)
                self.lacks = f"the {batch} windows of an evaluation overlap in the {len(tokens)} held-out tokens"

    def get(self, index: int, rows: Sequence[int]) -> np.ndarray:
        """Rows of evaluation batch `index`, 0 to num_batches - 1, with the shape of `Batches.get`."""
        its = _checked(rows, self.batch)
        if not 0 <= index < self.num_batches:
            raise ValueError(f"expected an evaluation batch from 0 to {self.num_batches - 1}, got {index}")
        return _rows(self.tokens, self._starts[index * self.batch + its], self.context)


def _mix(x: np.ndarray) -> np.ndarray:
    """A hash of 64-bit numbers: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _rows(tokens: np.ndarray | Tokens, starts: np.ndarray, context: int) -> np.ndarray:
    if isinstance(tokens, Tokens):
        return tokens.windows(starts, context + 1)
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def _check_tokens(tokens: np.ndarray | Tokens) -> None:
    if isinstance(tokens, Tokens):
        return
    if tokens.dtype != np.uint8 or tokens.ndim != 1:
        raise ValueError(f"tokens: expected one dimension of uint8, got {tokens.dtype} of shape {tokens.shape}")


def _checked(rows: Sequence[int], batch: int) -> np.ndarray:
    """The numbers of rows as int64. ValueError unless all are of the batch."""
    if len(rows) and not 0 <= min(rows) <= max(rows) < batch:
        raise ValueError(f"expected rows from 0 to {batch - 1}, got {min(rows)} to {max(rows)}")
    return np.asarray(rows, np.int64)
