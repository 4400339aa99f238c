"""Training that goes on when ranks are lost: mpirun --with-ft ulfm -np 4 python examples/elastic.py, then kill -9 a rank."""

import os

import torch

import mpitrain
from collectives import Communicator
from mpitrain import elastic


def build(comm: Communicator) -> elastic.State:
    model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(256, 4, batch_first=True) for _ in range(4)))
    mpitrain.fully_shard(model, comm)
    return elastic.State(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(state: elastic.State) -> None:
    while state.step < 200:
        batch = torch.randn(8, 32, 256)
        loss = (state.model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
        if state.step % 10 == 0:
            print(f"process {os.getpid()} has done step {state.step}, loss {loss.item():.2f}", flush=True)


elastic.run(train, build, every=10)
