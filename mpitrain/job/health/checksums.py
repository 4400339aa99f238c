"""Integer checksums of the bits of tensors, at the speed of memory, on any device.

A tensor is read as 64-bit words, and a last word of what is left. The plain sum of the words, modulo 2^64, changes with each single
flipped bit. Two flips may cancel in it: the same bit of two words, once from 0 to 1 and once from 1 to 0. So a second sum weights each
block of `BLOCK` words by its number, and each word after the last whole block by its own. It changes unless both flips are in one
block. Both sums need one pass over the memory. The words begin at the tensor's first element, so equal values have equal checksums
wherever they lie.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

BLOCK = 4096
"""Words of a block: 32 KiB, which fit the first cache."""
WORD_BYTES = 8
_MODULUS = 1 << 64
_FEW = 32  # blocks: 1 MiB


class Checksum(NamedTuple):
    """The two sums, from 0 to 2^64 - 1."""

    plain: int
    weighted: int


def checksums(tensors: Sequence[torch.Tensor]) -> list[Checksum]:
    """The checksum of each tensor. The host waits once for each device."""
    results = [Checksum(0, 0)] * len(tensors)
    places: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        words = _words(tensor)
        if words.device.type == "cpu":
            results[index] = _on_host(words)
        else:
            places.setdefault(words.device, []).append((index, _on_device(words)))
    for found in places.values():
        numbers = torch.stack([sums for _, sums in found]).tolist()
        for (index, _), (plain, weighted) in zip(found, numbers, strict=True):
            results[index] = Checksum(plain % _MODULUS, weighted % _MODULUS)
    return results


def flipped_bit(before: Checksum, after: Checksum) -> int | None:
    """The bit of a word, 0 to 63, if one flipped bit explains the change; None for another change."""
    difference = (after.plain - before.plain) % _MODULUS
    for size in (difference, _MODULUS - difference):
        if size & (size - 1) == 0 and 0 < size < _MODULUS:
            return size.bit_length() - 1
    return None


def block_sums(tensor: torch.Tensor) -> list[int]:
    """The sum of each block of words; the last entry is of all words after the whole blocks."""
    words = _words(tensor)
    whole = words.numel() // BLOCK * BLOCK
    return [*words[:whole].view(-1, BLOCK).sum(1).tolist(), int(words[whole:].sum())]


def _on_host(words: torch.Tensor) -> Checksum:
    """Of many tensors most are small, and NumPy begins an operation sooner than torch. Torch uses several threads."""
    terms = words.numpy()
    whole = len(terms) // BLOCK * BLOCK
    if whole > _FEW * BLOCK:
        terms = np.concatenate([words[:whole].view(-1, BLOCK).sum(1).numpy(), terms[whole:]])
    elif whole:
        terms = np.concatenate([np.add.reduce(terms[:whole].reshape(-1, BLOCK), axis=1), terms[whole:]])
    weighted = int(np.dot(terms, np.arange(1, len(terms) + 1)))
    return Checksum(int(np.add.reduce(terms)) % _MODULUS, weighted % _MODULUS)


def _on_device(words: torch.Tensor) -> torch.Tensor:
    """The two sums, which the host has not waited for."""
    whole = words.numel() // BLOCK * BLOCK
    terms = torch.cat([words[:whole].view(-1, BLOCK).sum(1), words[whole:]])
    weights = torch.arange(1, len(terms) + 1, device=words.device)
    return torch.stack([terms.sum(), (terms * weights).sum()])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as int64; a view where the memory allows it."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.resolve_neg().contiguous().view(-1)
    if not flat.numel():
        return flat.new_empty(0, dtype=torch.int64)
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)  # a copy of a bool would lose the other bits
    num_bytes = flat.numel() * flat.itemsize
    if num_bytes % WORD_BYTES:
        padded = flat.new_zeros(-(-num_bytes // WORD_BYTES) * WORD_BYTES // flat.itemsize)
        padded[: flat.numel()] = flat
        flat = padded
    elif (flat.storage_offset() * flat.itemsize) % WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int64)
