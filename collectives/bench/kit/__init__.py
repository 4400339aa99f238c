"""The kit that all benchmarks share: those of collectives here, of `ckpt.bench` and of `mpitrain.bench`.

A `Contestant` is a library, an algorithm or a layout with a method `turn`, which performs the measured actions once and returns this
rank's seconds. A contestant that cannot be made here raises `CannotTakePart`, and is shown as skipped. `take_turns` calls all of them
round by round in drawn orders, within one job, so that a disturbance of the machine hits all alike; `slowest` takes the slowest rank's
seconds, `spread` the median over the rounds (turns.py).

A `Launch` is a dataclass of all figures of one job, kept as a JSON file. Of several launches a report shows the medians of figures, and
the medians of ratios that were formed within each launch (launches.py), in tables (tables.py) and pictures (pictures.py).

`measure_and_show` is the order of a command: look whether the files can be written, measure, write, print (running.py). Its arguments
are read by arguments.py. torch_group.py starts torch.distributed for the peers that need it.
"""
