"""Train a small vision model on images in tar files: mpirun -np 2 python examples/train_images.py

The first start draws the images. Each start makes 60 steps more, from the last checkpoint on. It may have another number of ranks: its
global batches are those of one long run.
"""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ckpt
import collectives
import mpitrain
from mpitrain.data import TarSamples, batches

IMAGES, CHECKPOINTS = Path("example-images"), Path("example-checkpoints/images")
SHAPES, SIZE = ("disc", "square", "cross", "ring"), 16
BATCH, STEPS = 64, 60


def draw(shape: str, rng: np.random.Generator) -> np.ndarray:
    """A noisy image, (SIZE, SIZE) uint8, of a shape of any size at any place."""
    radius = rng.uniform(4, 7)
    dy, dx = np.abs(np.mgrid[:SIZE, :SIZE] - rng.uniform(radius, SIZE - radius, (2, 1, 1)))
    distance, longer, shorter = np.hypot(dy, dx), np.maximum(dy, dx), np.minimum(dy, dx)
    inside = {
        "disc": distance < radius,
        "square": longer < radius,
        "cross": (longer < radius) & (shorter < radius / 3),
        "ring": (distance < radius) & (distance > radius / 2),
    }[shape]
    return (120 * inside + rng.normal(60, 40, inside.shape)).clip(0, 255).astype(np.uint8)


def write_shard(path: Path, num_images: int, seed: int) -> None:
    """Write images 00000.npy, 00001.npy, ... to a tar file, each with its class beside it: 00000.cls."""
    rng = np.random.default_rng(seed)
    with tarfile.open(path, "w") as file:
        for number in range(num_images):
            label, image = int(rng.integers(len(SHAPES))), io.BytesIO()
            np.save(image, draw(SHAPES[label], rng))
            for part, data in (("npy", image.getvalue()), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"{number:05}.{part}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))


def decode(parts: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The image, (1, SIZE, SIZE), and the class of a sample."""
    pixels = torch.from_numpy(np.load(io.BytesIO(parts["npy"])))
    return pixels[None].float() / 128 - 1, int(parts["cls"])


def vision_model() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIZE // 8) ** 2, len(SHAPES)))


@torch.no_grad()
def accuracy(model: nn.Module, samples: TarSamples[tuple[torch.Tensor, int]]) -> float:
    comm, num_batches, right = collectives.world(), len(samples) // BATCH, torch.zeros(1)
    for _, (images, labels) in zip(range(num_batches), batches(samples, batch=BATCH, shuffle=False), strict=False):
        right += (model(images).argmax(1) == labels).sum()
    return comm.all_reduce(right).item() / (num_batches * BATCH)


def main() -> None:
    comm = collectives.world()
    with comm.together("drawing the images"):
        if comm.rank == 0 and not IMAGES.exists():
            IMAGES.mkdir()
            for shard in range(4):
                write_shard(IMAGES / f"train-{shard:03}.tar", 500, seed=shard)
            write_shard(IMAGES / "heldout.tar", 512, seed=99)
    comm.barrier()
    train, heldout = TarSamples(f"{IMAGES}/train-{{000..003}}.tar", decode), TarSamples(f"{IMAGES}/heldout.tar", decode)
    torch.manual_seed(0)
    model = vision_model()
    mpitrain.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batches(train, batch=BATCH, seed=1)  # workers=2: two processes of each rank decode ahead
    if last := ckpt.latest(CHECKPOINTS):
        data.load_state_dict(mpitrain.load(last, model, optimizer)["data"])
    for _, (images, labels) in zip(range(STEPS), data, strict=False):
        # The backward averages over the ranks. This makes it the mean over the batch, also if one rank has more rows than another.
        loss = cross_entropy(model(images), labels, reduction="sum") * comm.size / BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = comm.all_reduce(loss.detach(), "avg").item()
        if comm.rank == 0 and data.step % 10 == 0:
            print(f"step {data.step}  loss {mean:.4f}", flush=True)
    mpitrain.save(CHECKPOINTS / f"step-{data.step:05}", model, optimizer, meta={"data": data.state_dict()})
    share = accuracy(model, heldout)
    if comm.rank == 0:
        print(f"step {data.step}  held-out accuracy {share:.1%}")


if __name__ == "__main__":  # worker processes import this file
    main()
