"""Integer checksums of the bits of tensors, at the speed of memory, on any device.

A tensor is read as 64-bit words, and a last word of what is left. The plain sum of the words, modulo 2^64, changes with each single
flipped bit. Two flips may cancel in it: the same bit of two words, once from 0 to 1 and once from 1 to 0. So a second sum weights each
block of `BLOCK` words by its number, and each word after the last whole block by its own. It changes unless both flips are in one
block. Both sums need one pass over the memory. The words begin at the tensor's first element, so equal values have equal checksums
wherever they lie.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

BLOCK = 4096
"""Words of a block: 32 KiB, which fit the first cache."""
WORD_BYTES = 8
_MODULUS = 1 << 64


class Checksum(NamedTuple):
    """The two sums, from 0 to 2^64 - 1."""

    plain: int
    weighted: int


def checksums(tensors: Sequence[torch.Tensor]) -> list[Checksum]:
    """The checksum of each tensor. The host waits once for each device."""
    found = [_sums(tensor) for tensor in tensors]
    results = [Checksum(0, 0)] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for index, sums in enumerate(found):
        places.setdefault(sums.device, []).append(index)
    for indices in places.values():
        numbers = torch.stack([found[index] for index in indices]).tolist()
        for index, (plain, weighted) in zip(indices, numbers, strict=True):
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
    count = words.numel() // BLOCK
    blocks = words[: count * BLOCK].view(count, BLOCK).sum(1)
    return [*blocks.tolist(), words[count * BLOCK :].sum().item()]


@torch.no_grad()
def _sums(tensor: torch.Tensor) -> torch.Tensor:
    words = _words(tensor)
    count = words.numel() // BLOCK
    terms = words
    if count:
        terms = torch.cat([words[: count * BLOCK].view(count, BLOCK).sum(1), words[count * BLOCK :]])
    weights = torch.arange(1, len(terms) + 1, device=words.device)
    return torch.stack([terms.sum(), (terms * weights).sum()])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as int64; a view where the memory allows it."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    num_bytes = flat.numel() * flat.itemsize
    if num_bytes % WORD_BYTES:
        padded = flat.new_zeros(-(-num_bytes // WORD_BYTES) * WORD_BYTES // flat.itemsize)
        padded[: flat.numel()] = flat
        flat = padded
    elif (flat.storage_offset() * flat.itemsize) % WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int64)
