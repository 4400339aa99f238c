"""What is read of the kernel's cgroups, over folders that look like the kernel's."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from collectives.cgroup import Kills, groups_of, limit, room, smallest_limit, with_outer
from collectives.diagnosis.hangs.losses import knows_less, with_kill
from collectives.diagnosis.ring.roster import Member, Roster

MIB = 1 << 20
ENDLESS = "9223372036854771712"
STEP = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_1/step_0/user"
SLURM = f"{STEP}/task_0"


def make(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def second(folder: str, most: str, kills: int = 0, calls: int | None = 0, below: int = 0) -> dict[str, str]:
    """A group of version 2. `calls`: of the OOM killer because of its own limit, None in an old kernel; `below`: in groups below."""
    events = "low 0\nhigh 0\nmax 9\noom {}\noom_kill {}\noom_group_kill 0"
    files = {"memory.max": most, "memory.events": events.format((calls or 0) + below, kills)}
    if calls is not None:
        files["memory.events.local"] = events.format(calls, 0)
    return {f"{folder}/{name}": text for name, text in files.items()}


def first(folder: str, most: str, kills: int = 0, peak: int = 0) -> dict[str, str]:
    """A group of version 1."""
    control = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}"
    files = {"limit_in_bytes": most, "oom_control": control, "max_usage_in_bytes": str(peak)}
    return {f"{folder}/memory.{name}": text for name, text in files.items()}


MOUNT_2 = "29 23 0:26 {shown} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
MOUNT_1 = "35 31 0:32 {shown} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
HYBRID = "\n".join((MOUNT_1, MOUNT_2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")))
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected", "most"),
    [
        ("0::/a/b", "", second("sys/fs/cgroup/a", "5") | second("sys/fs/cgroup/a/b", "max"), ["a/b", "a"], 5),
        (
            "0::/a/b",
            MOUNT_2.format(shown="/"),
            second("sys/fs/cgroup/a", "5"),
            ["a"],
            5,
        ),  # b has no controller of memory
        ("0::/", MOUNT_2.format(shown="/"), {}, [], None),  # a host: the root has no limit, and counts nothing
        (
            "0::/",
            MOUNT_2.format(shown="/"),
            second("sys/fs/cgroup", "7"),
            [""],
            7,
        ),  # a container with a space of its own
        ("0::/docker/x/a", MOUNT_2.format(shown="/docker/x"), second("sys/fs/cgroup/a", "7"), ["a"], 7),
        ("0::/docker/y", MOUNT_2.format(shown="/docker/x"), second("sys/fs/cgroup", "7"), [""], 7),
        ("0::/../y", MOUNT_2.format(shown="/"), second("sys/fs/cgroup", "7"), [""], 7),
        ("0::/a (deleted)", MOUNT_2.format(shown="/"), second("sys/fs/cgroup/a", "7"), ["a"], 7),
        ("0::/a b", MOUNT_2.format(shown="/a\\040b"), second("sys/fs/cgroup", "7"), [""], 7),
        (
            "4:memory:/j\n0::/",
            MOUNT_1.format(shown="/"),
            first(f"{V1}/j", "9") | first(V1, ENDLESS),
            ["memory/j", "memory"],
            9,
        ),
        ("4:cpu,memory:/j", "", first(f"{V1}/j", ENDLESS) | first(V1, ENDLESS), ["memory/j", "memory"], None),
        (
            "4:memory:/j\n1:cpu:/k\n0::/j",
            HYBRID.format(shown="/"),
            first(f"{V1}/j", "9") | first(V1, "9"),
            ["memory/j", "memory"],
            9,
        ),
        ("4:cpu:/j", "", first("sys/fs/cgroup/cpu/j", "9"), [], None),
        ("0::/a", "", second("sys/fs/cgroup/a", str(10**30)), ["a"], None),
        ("0::/a", "", second("sys/fs/cgroup/a", "no number"), ["a"], None),
        ("nothing of the kind", "nor here - x", {}, [], None),
    ],
)
def test_the_groups_of_a_process_and_their_limit(
    cgroup: str, mounts: str, files: dict[str, str], expected: list[str], most: int | None, tmp_path: Path
) -> None:
    make(tmp_path, {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, **files})
    found = groups_of(root=tmp_path)
    assert found == tuple(tmp_path / "sys/fs/cgroup" / each for each in expected)
    assert smallest_limit(found) == most


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # Of 900 bytes 300 are copies of files, which the kernel drops. Shared memory is not among them.
        ({"max": "1000", "current": "900", "stat": "anon 300\nshmem 300\ninactive_file 200\nactive_file 100"}, 400),
        ({"max": "1000", "current": "1100", "stat": "inactive_file 0"}, 0),
        ({"max": "1000"}, 1000),
        ({"max": "1000", "current": "900", "stat": "slab_reclaimable 100\nslab_unreclaimable 200\nslab 300"}, 200),
        ({"max": "max", "current": "900"}, None),
        ({"limit_in_bytes": "1000", "usage_in_bytes": "900", "stat": "inactive_file 1\ntotal_inactive_file 250"}, 350),
        ({"limit_in_bytes": ENDLESS, "usage_in_bytes": "900"}, None),
    ],
)
def test_the_room_within_a_limit(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    inner, outer = tmp_path / "a/b", tmp_path / "a"
    make(inner, {f"memory.{name}": text for name, text in files.items()})
    make(outer, {"memory.max": "5000", "memory.current": "100"})
    assert room([inner]) == expected
    assert room([inner, outer]) == (4900 if expected is None else expected) and room([]) is None


@pytest.mark.parametrize(
    ("most", "used", "expected"),
    [("max", "0", 150), ("40", "30", 110), ("0", "0", 100), ("40", "50", 100), (None, "0", 100)],
)
def test_the_room_counts_swap_space_that_a_group_may_use(
    most: str | None, used: str, expected: int, tmp_path: Path
) -> None:
    swap = {} if most is None else {"memory.swap.max": most, "memory.swap.current": used}
    make(tmp_path, {"memory.max": "1000", "memory.current": "900", **swap})
    assert room([tmp_path], swap=50) == expected and room([tmp_path]) == 100


def test_without_cgroups_nothing_is_said(tmp_path: Path) -> None:
    assert groups_of(root=tmp_path) == () and limit(tmp_path) is None and Kills(()).words() == ""


def slurm(kills: int, at_job: int = 0, at_task: int = 0, task_limit: str = "max", calls: bool = True) -> dict[str, str]:
    """A task in a step of Slurm. `at_job`, `at_task`: how often their limits called the OOM killer."""
    job = STEP.removesuffix("/step_0/user")
    total = at_job + at_task
    files = second(job, str(512 * MIB), kills, at_job if calls else None, at_task if calls else total)
    for between in (f"{job}/step_0", STEP):
        files |= second(between, "max", kills, 0 if calls else None, at_task)
    return files | second(SLURM, task_limit, kills, at_task if calls else None)


OF_JOB = f"the outer cgroup {{root}}/{STEP.removesuffix('/step_0/user')} had reached its limit of memory, 512 MiB: ask for more memory"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (slurm(3), slurm(3), ""),  # the kills of an earlier step
        (
            slurm(3),
            slurm(4, at_job=1),
            f"has ended 1 process of the cgroup {{root}}/{SLURM}, because {OF_JOB} (Slurm: --mem",
        ),
        (
            slurm(3, calls=False),
            slurm(5, at_job=2, calls=False),
            f"has ended 2 processes of the cgroup {{root}}/{SLURM}, because {OF_JOB}",
        ),
        (
            slurm(0),
            slurm(1, at_task=1, task_limit=str(96 * MIB)),
            "because its limit of memory, 96 MiB, was reached: ask for more memory",
        ),
        # A task with a smaller limit that was not reached.
        (slurm(0, task_limit=str(96 * MIB)), slurm(1, at_job=1, task_limit=str(96 * MIB)), OF_JOB),
        (
            slurm(0),
            slurm(1),
            "because the memory of the host, or of a container around it, was full; the smallest limit of memory there is",
        ),
    ],
)
def test_kills_are_counted_from_the_start_with_the_limit_that_was_reached(
    before: dict[str, str], after: dict[str, str], words: str, tmp_path: Path
) -> None:
    make(tmp_path, before)
    kills = Kills(with_outer(tmp_path / SLURM))
    assert kills.words() == ""
    make(tmp_path, after)
    said = kills.words()
    assert words.format(root=tmp_path) in said and bool(said) == bool(words), said
    assert "\n" not in said
    assert with_kill("was killed by signal 9 (SIGKILL)", kills).endswith(f"(SIGKILL){': ' * bool(said)}{said}")
    assert with_kill("was killed by signal 11 (SIGSEGV)", kills) == "was killed by signal 11 (SIGSEGV)"
    assert with_kill("", kills) == (f"was killed: {said}" if said else "")


def test_version_1_counts_in_the_group_of_the_process_alone(tmp_path: Path) -> None:
    job, task, other = (tmp_path / V1 / each for each in ("job", "job/task_0", "job/task_1"))
    groups = {str(each.relative_to(tmp_path)): each for each in (job, task, other)}
    make(tmp_path, first(V1, ENDLESS) | {name: text for each in groups for name, text in first(each, ENDLESS).items()})
    kills = {each: Kills(with_outer(each)) for each in (task, other)}
    make(
        tmp_path,
        first(f"{V1}/job", str(400 * MIB), peak=400 * MIB)
        | first(f"{V1}/job/task_1", ENDLESS, kills=1, peak=399 * MIB),
    )
    assert kills[task].words() == ""
    assert (
        f"of the cgroup {other}, because the outer cgroup {job} had reached its limit of memory, 400 MiB"
        in kills[other].words()
    )


def test_a_group_that_is_gone_counts_in_the_one_around_it(tmp_path: Path) -> None:
    make(tmp_path, slurm(2))
    kills = Kills(with_outer(tmp_path / SLURM))
    make(tmp_path, slurm(3, at_job=1))
    for file in (tmp_path / SLURM).iterdir():
        file.unlink()
    (tmp_path / SLURM).rmdir()
    assert f"1 process of the cgroup {tmp_path / STEP}, because the outer" in kills.words()


def test_the_neighbour_on_the_same_node_reports_first() -> None:
    roster = Roster([Member(node, host, 1) for node, host in ((0, "a"), (0, "a"), (2, "b"), (2, "b"), (4, "c"))])
    assert [knows_less(rank, roster) for rank in range(5)] == [False, True, False, True, False]
    alone = Roster([Member(0, "a", 1), Member(1, "b", 1)])
    assert not knows_less(0, alone) and not knows_less(1, alone)
