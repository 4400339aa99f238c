"""The states of the random generators that a user's model may draw from, as one row of bytes per rank."""

import random
from typing import Any

import numpy as np
import torch

_WORDS = 625  # 32-bit words of a Mersenne Twister's state and its position


def pack(device: torch.device) -> np.ndarray:
    """The states of torch (host and `device`), NumPy's global generator and Python's: (1, n) uint8, n the same on all ranks."""
    numpy: Any = np.random.get_state(legacy=True)
    _, words, _ = random.getstate()
    parts = [
        torch.get_rng_state().numpy(),
        np.array([*numpy[1], numpy[2]], np.uint32).view(np.uint8),
        np.array(words, np.uint32).view(np.uint8),
    ]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device).numpy())
    return np.concatenate(parts)[None]


def unpack(row: np.ndarray, device: torch.device) -> None:
    """Restore the states of `pack`. NumPy and Python draw normals in pairs; the stored half of a pair is lost.

    ValueError or RuntimeError for bytes that are no states.
    """
    size = torch.get_rng_state().numel()
    flat = row.reshape(-1)
    numpy, python = flat[size : size + 4 * _WORDS], flat[size + 4 * _WORDS : size + 8 * _WORDS]
    torch.set_rng_state(torch.from_numpy(flat[:size].copy()))
    words = numpy.copy().view(np.uint32)
    if int(words[-1]) >= _WORDS:  # NumPy would read behind its state
        raise ValueError(f"a place in {_WORDS - 1} words is {int(words[-1])}")
    np.random.set_state(("MT19937", words[:-1], int(words[-1]), 0, 0.0))
    random.setstate((3, tuple(python.copy().view(np.uint32).tolist()), None))
    if device.type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(flat[size + 8 * _WORDS :].copy()), device)
