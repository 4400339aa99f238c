"""Shard a model of your own: mpirun -np 2 python examples/shard_your_model.py"""

import torch

import collectives
import mpitrain

comm = collectives.world()
torch.manual_seed(comm.rank)  # each rank draws batches of its own
model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(256, 4, batch_first=True) for _ in range(4)))
mpitrain.fully_shard(model)  # all ranks take rank 0's values; each layer becomes one unit that is gathered and reduced
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding: these are this rank's shards
for step in range(10):
    batch = torch.randn(8, 32, 256)
    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()  # gradients are averaged over the ranks; each rank keeps its share
    optimizer.step()
    optimizer.zero_grad()
    if comm.rank == 0:
        print(f"step {step}  loss {loss.item():.4f}")
mpitrain.save("example-checkpoints/step-10", model, optimizer, meta={"step": 10}, overwrite=True)
