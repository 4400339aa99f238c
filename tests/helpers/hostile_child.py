"""Opens checkpoints that mean harm, each in a process of its own, and tells what it took: run by tests/unit/ckpt/test_hostile.py.

python hostile_child.py FOLDER ...      # a JSON list [what came of it, bytes grown, seconds] for each
"""

import json
import os
import re
import sys
import time

import ckpt

TIMEOUT_S = 20


def use(path):
    """All that a reader may be asked for."""
    try:
        ckpt.list_checkpoints(os.path.dirname(path))
        checkpoint = ckpt.open(path)
        for entry in list(checkpoint.values())[:10]:
            entry.read(tuple(slice(0, 2) for _ in entry.shape))
        for entry in list(checkpoint.values())[:10]:
            entry.read()
        for damage in ckpt.verify(path):
            return f"damage: {damage}"
    except ckpt.CheckpointError as error:
        return f"refused: {error}"
    return "read"


def memory(key):
    with open("/proc/self/status") as file:
        return int(re.search(rf"{key}:\s+(\d+) kB", file.read())[1]) << 10


def measure(path):
    out, into = os.pipe()
    if not (child := os.fork()):
        before, start = memory("VmRSS"), time.monotonic()
        try:
            what = use(path)
        except BaseException as error:
            what = f"failed: {error!r:.300}"
        report = [what, memory("VmHWM") - before, time.monotonic() - start]
        os.write(into, json.dumps(report).encode()[:60_000])
        os._exit(0)
    os.close(into)
    deadline = time.monotonic() + TIMEOUT_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.005)
    if not ended[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
        return ["hangs", 0, TIMEOUT_S]
    if ended[1]:
        return [f"crashes: {ended[1]}", 0, 0]
    with open(out, "rb") as pipe:
        return json.loads(pipe.read())


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(json.dumps(measure(path)), flush=True)
