"""Figures, a callback and a sink of a user: mpirun -np 2 python -m mpitrain --run runs/hooks --log.modules examples/hooks.py"""

import mpitrain


class Progress(mpitrain.Callback):
    """Runs on every rank."""

    def step(self, moment):
        mpitrain.log({"my/tokens": moment.step * moment.config.train.batch * moment.model.config.context})

    def save(self, moment):
        if moment.comm.rank == 0:
            print("saved", moment.figures["path"])


class Lines(mpitrain.Sink):
    """Runs on rank 0."""

    def step(self, step, figures):
        if step % 100 == 0:
            print(step, figures["loss"])


mpitrain.log(callback=Progress(), sink=Lines())
