"""Micro-batches, and their copies on a GPU."""

import pytest
import torch

from mpitrain.job.train.batches.micro_batch import GpuCopies, MicroBatch
from mpitrain.models import Segments

SLEEP = 200_000_000  # cycles of a GPU: a tenth of a second


def batch() -> MicroBatch:
    tokens = torch.arange(4 * 9).view(4, 9)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], Segments.of(tokens[:, :-1] // 5), num_padding=3)


def equal(a: MicroBatch, b: MicroBatch) -> bool:
    assert a.segments is not None and b.segments is not None
    pairs = zip((a.tokens, a.targets, a.segments.positions), (b.tokens, b.targets, b.segments.positions), strict=True)
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs) and a.segments.lengths == b.segments.lengths


def test_the_same_on_another_device() -> None:
    there = batch().to(torch.device("meta"))
    assert there.tokens.is_meta and there.targets.is_meta and there.segments is not None
    assert there.segments.positions.is_meta and there.num_padding == 3
    assert equal(batch().to(torch.device("cpu")), batch())


@pytest.mark.gpu
def test_a_copy_travels_while_the_gpu_computes() -> None:
    device = torch.device("cuda", 0)
    copies = GpuCopies(device)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    sent = copies.begun(batch())
    assert sent.copy is not None
    sent.copy.event.synchronize()
    assert not torch.cuda.current_stream(device).query(), "the copy waited for the kernel"
    assert equal(sent.to(device), batch()) and sent.to(device).tokens.device == device


@pytest.mark.gpu
def test_kernels_wait_for_the_copy() -> None:
    device = torch.device("cuda", 0)
    copies = GpuCopies(device)
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(SLEEP)
    assert equal(copies.begun(batch()).to(device), batch())
