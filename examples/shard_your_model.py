"""Shard a model of your own: mpirun -np 2 python examples/shard_your_model.py"""

import torch

import collectives
import mpitrain

comm = collectives.world()
model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(256, 4, batch_first=True) for _ in range(4)))
for block in model:
    mpitrain.fully_shard(block)  # each block is gathered, used and reduced as one
mpitrain.fully_shard(model)  # the rest, and the order of events
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # after sharding: these are the shards

for step in range(10):
    batch = torch.randn(8, 32, 256, generator=torch.Generator().manual_seed(step * comm.size + comm.rank))
    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()  # gradients are averaged over the ranks; each keeps its share
    mpitrain.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    comm.all_reduce(mean := loss.detach(), "avg")
    if comm.rank == 0:
        print(f"step {step}  loss {mean:.4f}")

mpitrain.save("example-checkpoints/step-10", model, optimizer, meta={"step": 10}, overwrite=True)
