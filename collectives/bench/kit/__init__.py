"""The kit of all benchmarks: of collectives here, of `ckpt.bench` and of `mpitrain.tools.bench`.

A `Contestant` is a library, an algorithm or a layout with a method `turn`, which performs the measured actions once and returns this
rank's seconds. A contestant that cannot be made on these ranks raises `CannotTakePart`, and is reported as skipped. `take_turns` calls
all contestants in each round of one job, in random order, so that a disturbance of the machine affects all of them; `slowest` takes the
slowest rank's seconds, `spread` the median over the rounds (turns.py).

A `Launch` is a dataclass of all figures of one job, stored as a JSON file. A report on several launches shows medians of figures, and
medians of ratios that were computed within each launch (launches.py), in tables and pictures (collectives/shared/).

`measure_and_show` runs a command: it checks that the files can be written, measures, writes and prints (running.py).
torch_group.py starts torch.distributed for the peers that need it."""
