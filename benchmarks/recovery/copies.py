"""How long the copies that go to another host take: `mpirun -np 2 -H host1,host2 python -m benchmarks.recovery.copies`.

    ./mpirun/cluster run -H 2x1 --rate 1gbit -- python -m benchmarks.recovery.copies --mb 64 --num 9

Rank 0 prints one line of JSON with medians over the copies, each of the slowest rank: `held_s`, for which a copy holds up the training;
`sent_s`, from there until the other host has it; and `cpu_s`, the processor time of a rank for both. The file runs with an earlier
version too, by its path.
"""

import argparse
import json
import statistics
import time

import numpy as np

import ckpt
import collectives
from mpitrain.job.elastic.copies.files import remove_copies
from mpitrain.job.elastic.copies.taking import StateCopies


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery.copies")
    parser.add_argument("--mb", type=float, default=64.0, help="megabytes of a rank (default: %(default)s)")
    parser.add_argument("--num", type=int, default=9, help="copies (default: %(default)s)")
    options = parser.parse_args()
    comm = collectives.world()
    if comm.num_nodes == 1:
        raise SystemExit("expected ranks on several hosts, got one host")
    run = comm.broadcast_object(f"bench{time.time_ns():x}")
    data = np.random.default_rng(comm.rank).integers(0, 255, int(options.mb * 1e6), np.uint8)
    tensors = {"x": ckpt.Shard(data, (comm.size * data.size,), (comm.rank * data.size,))}
    copies = StateCopies(comm, run, 1)
    partners = copies._partners
    assert partners is not None
    rows = []
    try:
        for step in range(options.num + 2):
            comm.barrier()
            cpu, held = time.process_time(), copies.seconds
            copies.take(step, tensors, {})
            held, taken = copies.seconds - held, time.perf_counter()
            partners.wait()
            rows.append((held, time.perf_counter() - taken, time.process_time() - cpu))
        copies.close(remove=True)
    finally:
        remove_copies(run)
    slowest = np.max(comm.all_gather_object(rows[2:]), axis=0)  # the first two make the files
    if comm.rank == 0:
        held_s, sent_s, cpu_s = (round(statistics.median(column), 4) for column in slowest.T.tolist())
        print(json.dumps({"mb": options.mb, "copies": options.num, "held_s": held_s, "sent_s": sent_s, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
