"""The doctor's judgements on made-up facts, their words and exit codes, the limits of checks, and the copies that it removes."""

import fcntl
import io
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from collectives.processes import age_s
from mpitrain.job.elastic.copies.orphans import orphans, remove_orphans
from mpitrain.tools.doctor import beforehand, host, network, ranks
from mpitrain.tools.doctor.checks import CHECKS, Check
from mpitrain.tools.doctor.doctor_command import main
from mpitrain.tools.doctor.findings import Finding, Level, each, exit_code, names, ok, show, summary
from mpitrain.tools.doctor.host import Disk, Leftovers, Memory, Most, Temporary
from mpitrain.tools.doctor.job import Mpi, NodeWork, SharedFolderCheck
from mpitrain.tools.doctor.judges.host import judge_disk, judge_leftovers, judge_memory, judge_need, judge_temporary
from mpitrain.tools.doctor.judges.job import judge_mpi, judge_node_work, judge_shared_folder
from mpitrain.tools.doctor.judges.network import judge_clocks, judge_links, judge_ports
from mpitrain.tools.doctor.judges.packages import Aware, judge_gpu, judge_hdf5
from mpitrain.tools.doctor.judges.ranks import judge_cores, judge_environment, judge_limits, judge_names, judge_versions
from mpitrain.tools.doctor.network import Clock, NetworkLink, Reach
from mpitrain.tools.doctor.packages import Gpu, Hdf5, Need
from mpitrain.tools.doctor.ranks import Cores, Environment, Names, PeerReads, ProcessLimits, Versions
from mpitrain.tools.doctor.worker import Failed, bounded, judged

GIB = 1 << 30
MPI = Mpi(
    version="Open MPI v5.0.11",
    standard="3.1",
    threads="MPI_THREAD_MULTIPLE",
    paths=("/opt/mpi/lib/libmpi.so.40",),
    has_ulfm=True,
    ucx_is_loaded=False,
    has_progress_thread=True,
    size=4,
    num_nodes=2,
    launched=True,
    launcher="mpirun (Open MPI) 5.0.11",
    launcher_path="/opt/mpi/bin/mpirun",
    launcher_libraries="/opt/mpi/lib",
    ft_enabled="1",
    pml="",
)
DISK = Disk("/data/run", "ext4", 50 * GIB, 64 << 20, 1e9, 2e9, True, True, "")
MEMORY = Memory("/dev/shm", "tmpfs", 16 * GIB, 15 * GIB, "")
MOST = Most(16 * GIB, True)
LEFT = Leftovers([], 0, [], [], 0, 3600.0, [])
LIMITS = ProcessLimits(20000, -1, False, -1, 32 * GIB, 30 * GIB, 0.0)
CORES = Cores((0, 1, 2, 3), 4, 0, False, 0.0)
VERSIONS = Versions("3.11.7", {"torch": "2.13.0+cpu", "h5py": "3.16.0"}, {"torch": "2.7"}, "c0de", "/opt/mpitrain")
GPU = Gpu(torch="2.13.0", cuda="12.6", files=("/dev/nvidia0",), devices=("H100, 80 GB, sm_90",), nccl="2.27.7")
RULES = PeerReads(1, "", "linux 6.1")


def worst(findings: list[Finding]) -> Finding:
    """The first finding of the highest level; each that is not ok says what to do."""
    assert findings
    for finding in findings:
        assert finding.level is Level.OK or (finding.expected and finding.remedy), finding
    return max(findings, key=lambda finding: list(Level).index(finding.level))


def mpi(**changes: object) -> Finding:
    return worst(judge_mpi({"rank 0 on a": MPI._replace(**changes)}))  # type: ignore[arg-type]


CASES: list[tuple[Finding, Level, str, str]] = [
    (mpi(), Level.OK, "", ""),
    (mpi(paths=("/a/libmpi.so.40", "/b/libmpi.so.12")), Level.ERROR, "2 MPI libraries in one process", "reinstall"),
    (mpi(launcher_libraries="/usr/lib"), Level.WARNING, "mpirun uses the libraries in /usr/lib", "/opt/mpi/lib"),
    (mpi(launched=False, ft_enabled=""), Level.NOTE, "one process without mpirun", "mpirun -np N"),
    (mpi(threads="MPI_THREAD_SERIALIZED"), Level.WARNING, "MPI_THREAD_SERIALIZED", "Open MPI 5"),
    (mpi(ft_enabled=""), Level.NOTE, "not on in this job", "mpirun --with-ft ulfm"),
    (mpi(ft_enabled="0"), Level.NOTE, "turned off by OMPI_MCA_mpi_ft_enable=0", "mpirun --with-ft ulfm"),
    (mpi(has_ulfm=False), Level.NOTE, "built without it", "python -m mpitrain elastic"),
    (mpi(version="MPICH 5.0.2", ft_enabled=""), Level.NOTE, "MPICH 5.0.2 cannot continue in place", "elastic"),
    (mpi(pml="ucx"), Level.ERROR, "OMPI_MCA_pml=ucx", "--mca pml ob1"),
    (mpi(pml="^ucx"), Level.OK, "", ""),
    (
        worst(judge_mpi({"rank 0 on a": MPI, "rank 1 on b": MPI._replace(version="Open MPI v4.1.4")})),
        Level.ERROR,
        "2 MPI libraries in one job: Open MPI v4.1.4, Open MPI v5.0.11",
        "the same version on all hosts",
    ),
    (worst(judge_node_work(NodeWork(2, "", True, RULES))), Level.OK, "", ""),
    (worst(judge_node_work(NodeWork(2, "", False, RULES))), Level.NOTE, "Yama", "MPITRAIN_PEER_READS=1"),
    (worst(judge_node_work(NodeWork(2, "", False, RULES._replace(yama=2)))), Level.NOTE, "Yama", "as root"),
    (worst(judge_node_work(NodeWork(2, "", False, RULES._replace(switch="0")))), Level.NOTE, "turned off", "unset"),
    (worst(judge_node_work(NodeWork(2, "", False, RULES._replace(yama=0)))), Level.NOTE, "container", "SYS_PTRACE"),
    (worst(judge_node_work(NodeWork(2, "no room", True, RULES))), Level.ERROR, "no room", "MPITRAIN_SHM_DIR"),
    (worst(judge_memory(MEMORY)), Level.OK, "", ""),
    (worst(judge_memory(MEMORY, Need(20 * GIB))), Level.ERROR, "15 GiB of 16 GiB free", "--shm-size"),
    (worst(judge_memory(MEMORY._replace(total=64 << 20))), Level.WARNING, "of 64 MiB", "emptyDir"),
    (worst(judge_memory(MEMORY._replace(kind="ext4"))), Level.WARNING, "a disk", "tmpfs"),
    (worst(judge_memory(MEMORY._replace(failure="Permission denied"))), Level.ERROR, "Permission denied", "chmod 1777"),
    (worst(judge_memory(MEMORY._replace(failure="No space left on device"))), Level.ERROR, "No space", "--clean"),
    (worst(judge_need(Need(failure="settings are wrong"), MOST)), Level.NOTE, "settings are wrong", "memory --help"),
    (worst(judge_need(Need(0, 10 * GIB), MOST)), Level.OK, "", ""),
    (worst(judge_need(Need(0, 15 * GIB), MOST)), Level.WARNING, "and the limit of the cgroup is 16 GiB", "--mem"),
    (worst(judge_need(Need(0, 20 * GIB), MOST)), Level.ERROR, "more than the limit of the cgroup, 16 GiB", "--mem"),
    (
        worst(judge_need(Need(0, 20 * GIB), Most(16 * GIB, False))),
        Level.ERROR,
        "more than the memory of this host",
        "memory --np",
    ),
    (worst(judge_leftovers(LEFT)), Level.OK, "", ""),
    (worst(judge_leftovers(LEFT._replace(copies=["/dev/shm/c"], copy_bytes=GIB))), Level.NOTE, "1 copy", "--clean"),
    (worst(judge_leftovers(LEFT._replace(copies=["/c"], removed=["/c"]))), Level.OK, "removed 1 copy", ""),
    (worst(judge_leftovers(LEFT._replace(others=["/dev/shm/sm_segment.a"]))), Level.NOTE, "1 file", "rm /dev/shm/sm"),
    (
        worst(judge_leftovers(LEFT._replace(others=["/dev/shm/a", "/b/"]))),
        Level.NOTE,
        "2 files",
        "rm -r /dev/shm/a /b/",
    ),
    (
        worst(judge_leftovers(LEFT._replace(packs=("/p/.new.a",), pack_bytes=GIB))),
        Level.NOTE,
        "1 unpacked environment in which no process runs, 1 GiB",
        "rm -r /p/.new.a",
    ),
    (
        worst(judge_leftovers(LEFT._replace(sessions=["/tmp/ompi.7"]))),
        Level.NOTE,
        "killed mpiruns",
        "rm -r /tmp/ompi.7",
    ),
    (worst(judge_disk(DISK)), Level.OK, "", ""),
    (worst(judge_disk(DISK._replace(failure="fsync: Input/output error"))), Level.ERROR, "fsync: Input", "--run DIR"),
    (worst(judge_disk(DISK._replace(kind="tmpfs"))), Level.WARNING, "in memory", "--run DIR"),
    (worst(judge_disk(DISK._replace(free=1 << 20))), Level.WARNING, "1 MiB free", "remove old checkpoints"),
    (worst(judge_disk(DISK._replace(write_speed=1e6))), Level.WARNING, "writes 1 MB/s", "--checkpoint.background"),
    (worst(judge_disk(DISK._replace(locks=False))), Level.WARNING, "lock", "flock"),
    (worst(judge_disk(DISK._replace(links=False))), Level.NOTE, "copied", "no remedy"),
    (worst(judge_temporary(Temporary("/tmp", GIB, ""))), Level.OK, "", ""),
    (worst(judge_temporary(Temporary("/tmp", 0, "Read-only file system"))), Level.ERROR, "Read-only", "TMPDIR"),
    (worst(judge_temporary(Temporary("/tmp", 1 << 20, ""))), Level.WARNING, "1 MiB free", "TMPDIR"),
    (worst(judge_temporary(Temporary("/scratch" * 10, GIB, ""))), Level.WARNING, "80 characters", "short path"),
    (worst(judge_limits(LIMITS)), Level.OK, "", ""),
    (worst(judge_limits(LIMITS._replace(open_files=256))), Level.WARNING, "ulimit -n is 256", "ulimit -n 65536"),
    (worst(judge_limits(LIMITS._replace(locked=65536, has_rdma=True))), Level.WARNING, "64 KiB", "LimitMEMLOCK"),
    (worst(judge_limits(LIMITS._replace(locked=65536))), Level.OK, "", ""),
    (worst(judge_limits(LIMITS._replace(memory=GIB // 2))), Level.WARNING, "the cgroup to 512 MiB", "--memory"),
    (worst(judge_environment(Environment({}, {}))), Level.OK, "", ""),
    (
        worst(judge_environment(Environment({}, {"MPITRAIN_PACK_DIR": "is 'a', which"}))),
        Level.ERROR,
        "PACK_DIR is 'a'",
        "let it",
    ),
    (
        worst(judge_environment(Environment({"MPITRAIN_DEBUG": "yes"}, {}))),
        Level.ERROR,
        "'yes'",
        "unset MPITRAIN_DEBUG",
    ),
    (worst(judge_gpu(Gpu(torch="2.13.0+cpu"))), Level.OK, "none", ""),
    (worst(judge_gpu(GPU)), Level.OK, "", ""),
    (worst(judge_gpu(GPU, num_ranks=2)), Level.WARNING, "2 ranks share 1 x H100", "1 ranks on each host"),
    (worst(judge_gpu(GPU._replace(cuda="", devices=()))), Level.WARNING, "a build for CPUs", "pip install torch"),
    (worst(judge_gpu(GPU._replace(devices=()))), Level.ERROR, "sees none", "CUDA_VISIBLE_DEVICES"),
    (worst(judge_gpu(GPU._replace(wrong=("GPU 0: no kernel image",)))), Level.ERROR, "no kernel image", "nvidia-smi"),
    (worst(judge_gpu(GPU._replace(no_nccl="CuPy is not installed"))), Level.WARNING, "CuPy", "mpitrain[cuda12]"),
    (worst(judge_gpu(GPU, Aware(False, "it says no"))), Level.NOTE, "NCCL carries", "MPITRAIN_MPI=system"),
    (worst(judge_gpu(Gpu(failure="the process was ended by SIGILL"))), Level.ERROR, "SIGILL", "import torch"),
    (worst(judge_hdf5(Hdf5("3.16", "1.14", True))), Level.OK, "", ""),
    (worst(judge_hdf5(Hdf5("3.16", "1.14"))), Level.NOTE, "not parallel", "./mpirun/setup hdf5"),
    (
        worst(judge_hdf5(Hdf5("3.16", "1.14", True, "", ("/a/libmpi.so", "/b/libmpi.so")))),
        Level.ERROR,
        "second",
        "mpicc",
    ),
    (worst(judge_hdf5(Hdf5("3.16", "1.14", True, save_failure="OSError: x"))), Level.ERROR, "OSError", "posix"),
    (worst(judge_hdf5(Hdf5(failure="SIGSEGV"))), Level.ERROR, "SIGSEGV", "force-reinstall"),
    (worst(judge_cores({"rank 0 on a": CORES, "rank 1 on a": CORES})), Level.OK, "not bound", ""),
    (
        worst(judge_cores({f"rank {i} on a": CORES._replace(allowed=(i,)) for i in range(4)})),
        Level.OK,
        "each bound to 1",
        "",
    ),
    (
        worst(judge_cores({f"rank {i} on a": CORES._replace(allowed=(i % 2,)) for i in range(2, 5)})),
        Level.WARNING,
        "3 ranks on 2 of 4 cores",
        "yield_when_idle=1",
    ),
    (
        worst(judge_cores({f"rank {i} on a": CORES._replace(allowed=(0, i // 2 + 1)) for i in range(2)})),
        Level.OK,
        "",
        "",
    ),
    (
        worst(judge_cores({f"rank {i} on a": CORES._replace(allowed=(i // 2 * 2, i // 2 * 2 + 1)) for i in range(4)})),
        Level.WARNING,
        "rank 0 on a and rank 1 on a are bound to the same cores (0, 1 and 0, 1)",
        "--bind-to none",
    ),
    (
        worst(judge_cores({f"rank {i} on a": CORES._replace(threads=4) for i in range(2)})),
        Level.WARNING,
        "4 threads x 2 ranks on 4 cores",
        "OMP_NUM_THREADS=2",
    ),
    (
        worst(judge_cores({f"rank {i} on a": CORES._replace(quota=1.5) for i in range(2)})),
        Level.WARNING,
        "may use 1.5 cores",
        "--cpus",
    ),
    (worst(judge_cores({"rank 0 on a": CORES, "rank 1 on b": CORES})), Level.OK, "1 rank on 4 of 4 cores", ""),
    (worst(judge_versions({"a": VERSIONS, "b": VERSIONS})), Level.OK, "the same on 2 hosts", ""),
    (worst(judge_versions({"a": VERSIONS, "b": VERSIONS._replace(code="bad")})), Level.ERROR, "sources on b", "commit"),
    (
        worst(judge_versions({"a": VERSIONS, "b": VERSIONS._replace(python="3.12.1")})),
        Level.WARNING,
        "3.12.1 on b",
        "one",
    ),
    (
        worst(judge_versions({"a": VERSIONS._replace(packages={"torch": "2.6.1"})})),
        Level.ERROR,
        "version 2.6.1",
        "pip install 'torch>=2.7'",
    ),
    (
        worst(judge_versions({"a": VERSIONS._replace(packages={"torch": ""})})),
        Level.ERROR,
        "not installed",
        "pip install",
    ),
    (worst(judge_names({"a": Names("a", ("10.0.0.1",), "")})), Level.OK, "", ""),
    (
        worst(judge_names({"a": Names("a", ("10.0.0.1",), ""), "b": Names("b", ("127.0.1.1",), "")})),
        Level.WARNING,
        "b is 127.0.1.1",
        "/etc/hosts",
    ),
    (worst(judge_names({"a": Names("a", (), "not known")})), Level.NOTE, "a has no address", "/etc/hosts"),
    (worst(judge_clocks({"a": Clock(0, 0), "b": Clock(0.01, 1e-5)})), Level.OK, "10 ms apart on 2 hosts", ""),
    (worst(judge_clocks({"a": Clock(0, 0), "b": Clock(-0.4, 1e-5)})), Level.NOTE, "400 ms behind a", "chronyc"),
    (worst(judge_clocks({"a": Clock(0, 0), "b": Clock(75, 1e-5)})), Level.WARNING, "75 s ahead of a", "on b"),
    (worst(judge_clocks({"a": Clock(0, 0), "b": Clock(0.4, 0.3)})), Level.OK, "", ""),  # within the error
    (worst(judge_links([NetworkLink("rank 0 on a", "rank 1 on b", 1e9, 1e-5)])), Level.OK, "1 GB/s", ""),
    (
        worst(judge_links([NetworkLink("rank 0 on a", "rank 1 on b", 1e7, 1e-5)])),
        Level.WARNING,
        "0.01 GB/s",
        "if_include",
    ),
    (
        worst(
            judge_links(
                [NetworkLink(f"rank {i} on h{i}", f"rank 9 on h{i + 1}", 1e9 + 9e9 * (i > 0), 1e-5) for i in range(3)]
            )
        ),
        Level.WARNING,
        "from rank 0 on h0",
        "cable",
    ),
    (worst(judge_ports([Reach("rank 0 on a", "rank 1 on b", True, ("10.0.0.2",))])), Level.OK, "", ""),
    (
        worst(judge_ports([Reach("rank 0 on a", "rank 1 on b", False, ("10.0.0.2",))])),
        Level.ERROR,
        "no connection from a to b (1 of 1 fail; tried 10.0.0.2)",
        "firewall",
    ),
    (
        worst(
            judge_shared_folder({"a": SharedFolderCheck("/r", True, True), "b": SharedFolderCheck("/r", True, True)})
        ),
        Level.OK,
        "",
        "",
    ),
    (
        worst(
            judge_shared_folder({"a": SharedFolderCheck("/r", True, True), "b": SharedFolderCheck("/r", False, False)})
        ),
        Level.ERROR,
        "not seen on b",
        "network file system",
    ),
    (
        worst(
            judge_shared_folder({"a": SharedFolderCheck("/r", True, True), "b": SharedFolderCheck("/r", True, False)})
        ),
        Level.WARNING,
        "a lock that rank 0 holds in /r is not seen on b",
        "local_lock=none",
    ),
]


@pytest.mark.parametrize(("finding", "level", "found", "remedy"), CASES)
def test_judgements(finding: Finding, level: Level, found: str, remedy: str) -> None:
    assert finding.level is level, finding
    assert found in finding.found and remedy in finding.remedy, finding


def test_one_host_has_nothing_to_compare() -> None:
    assert judge_clocks({"a": Clock(0, 0)}) == []
    assert judge_links([]) == judge_ports([]) == []
    assert judge_shared_folder({"a": SharedFolderCheck("/r", True, True)}) == []


def test_findings_of_many_hosts_are_few_lines() -> None:
    facts = {
        f"h{i}": MEMORY._replace(free=15 * GIB + i, failure="Permission denied" if i == 3 else "") for i in range(50)
    }
    good, bad = sorted(each(judge_memory)(facts), key=lambda finding: list(Level).index(finding.level))
    assert (good.level, good.where) == (Level.OK, "h0; 48 more ok")
    assert (bad.level, bad.where) == (Level.ERROR, "h3")
    all_differ = {f"h{i}": MEMORY._replace(failure=f"error {i}") for i in range(50)}
    findings = each(judge_memory)(all_differ)
    assert len(findings) == 4 and findings[-1].found.endswith("(and 46 more such)")
    assert [finding.where for finding in each(judge_disk)({"a": DISK, "b": DISK})] == [""]
    assert names(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"


def test_exit_codes_and_words() -> None:
    note, warning, error = (replace(ok("x", "y"), level=level) for level in list(Level)[1:])
    assert [exit_code([ok("x", "y"), it], strict=False) for it in (note, warning, error)] == [0, 0, 1]
    assert [exit_code([ok("x", "y"), it], strict=True) for it in (note, warning, error)] == [0, 1, 1]
    assert summary([ok("x", "y"), note, note, error]) == "1 error, 2 notes, 1 ok"
    long = Finding(Level.ERROR, "node memory", "word " * 60, "words " * 30, "[not markup] " * 20, "host1", "Node")
    out = io.StringIO()
    show(Console(file=out, width=240, highlight=False), [ok("x", "y"), long], head="the doctor", strict=False)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100 and not any(line.endswith(" ") for line in lines)
    assert lines[0] == "the doctor" and lines[-1] == "1 error, 1 ok; exit code 1"
    assert any(line.startswith("  error   node memory     host1: word") for line in lines), out.getvalue()
    assert "[not markup]" in out.getvalue()
    assert Finding.from_dict(long.to_dict()) == long


def test_a_check_that_hangs_or_crashes_is_a_finding() -> None:
    begin = time.monotonic()
    hung = bounded(lambda: time.sleep(5), 0.1)
    assert isinstance(hung, Failed) and hung.text == "no end within 0.1 s" and time.monotonic() - begin < 2

    def crash() -> None:
        raise KeyError("x")

    crashed = bounded(crash, 1.0)
    assert crashed.text == "KeyError: 'x'"
    check = Check("disk", "Disk", "host", lambda _: None, each(judge_disk), remedy="ask who runs it")
    findings = judged(check, {"a": hung, "b": DISK, "c": crashed, "d": "no facts"})
    assert [finding.level for finding in findings] == [Level.ERROR] * 3
    assert {finding.where for finding in findings} == {"a", "c", ""} and findings[0].remedy == "ask who runs it"
    assert "cannot be judged" in findings[2].found
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_measurements_of_this_host_are_true_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path))
    disk = host.disk(tmp_path / "run" / "of" / "tomorrow", 1 << 20, 3.0)
    assert disk.folder == str(tmp_path) and disk.failure == "" and disk.written == 1 << 20
    assert disk.locks and disk.links and disk.write_speed > 0 < disk.read_speed
    assert host.node_memory().failure == "" and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path / "none"))
    assert host.node_memory().failure == "No such file or directory"
    assert host.disk(Path("/proc/self/run"), 1 << 20, 3.0).failure.startswith("writing a file: ")


def test_pairs_of_a_ring_are_disjoint_in_each_round() -> None:
    for number in range(1, 9):
        rounds = [list(pairs) for pairs in network.ring_rounds(range(number))]
        for pairs in rounds:
            ranks = [rank for pair in pairs for rank in pair]
            assert len(ranks) == len(set(ranks))
        expected = {(i, (i + 1) % number) for i in range(number)} if number > 2 else {(0, 1)} if number == 2 else set()
        assert {pair for pairs in rounds for pair in pairs} == expected


def test_what_dead_jobs_have_left_is_listed_and_what_living_ones_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path))
    dead = next(pid for pid in range(300, 1 << 22) if not Path(f"/proc/{pid}").exists())
    files = [
        tmp_path / f"mpitrain-{pid}-{letter * 32}" for pid, letter in ((dead, "a"), (os.getpid(), "b"), (dead, "c"))
    ]
    for path in files:
        path.mkdir()
    for path in files[:2]:
        os.utime(path, (0, 0))  # the last one is of a rank that joins the ring just now
    packs = tmp_path / f"mpitrain-pack-{os.getuid()}"
    other = packs.with_name(f"{packs.name}.1")
    for own in (packs, other):
        own.mkdir(0o700)
        for name in (".new.abc", "1234.dead", "1234", "used"):
            (own / name / "env").mkdir(parents=True)
            (own / name / "env/file").write_bytes(bytes(8192))
    locks = [os.open(path, os.O_RDONLY) for path in (packs / "used", other / "used", other)]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as a rank has, and as a process that unpacks
    found = host.leftovers(clean=False, older_than_s=0.0)
    assert found.others == [f"{files[0]}/"]
    unused = [packs / name for name in (".new.abc", "1234", "1234.dead")]
    assert found.packs == (*map(str, unused), str(other / "1234"))
    assert 4 * 8192 <= found.pack_bytes <= 4 * (8192 + 2 * 4096)
    for lock in locks:
        os.close(lock)
    monkeypatch.setenv("MPITRAIN_PACK_DIR", str(tmp_path / "none"))
    assert host.leftovers(clean=False, older_than_s=0.0).packs == ()


def test_orphans_are_old_copies_that_no_process_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path))
    user, old = os.getuid(), time.time() - 7200

    def copy(name: str, *, is_old: bool = True) -> Path:
        path = tmp_path / name
        path.write_bytes(b"state")
        if is_old:
            os.utime(path, (old, old))
        return path

    for name in (f"mpitrain-{user}", f"mpitrain-{user + 1}"):
        (tmp_path / name).mkdir(0o700)
    dead = copy(f"mpitrain-{user}/copy-run-local-00000001-00000.0")
    held = copy(f"mpitrain-{user}/copy-run-local-00000001-00001.0")
    young = copy(f"mpitrain-{user}/copy-run-job7-00000002-00000.0", is_old=False)
    others = [copy(f"mpitrain-{user + 1}.1"), copy("mpitrain-4711-abc"), copy("copy-run-local-00000001-00000.0")]
    (tmp_path / f"mpitrain-{user}/copy-run-link").symlink_to(others[2])
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert orphans() == [dead]
        assert orphans(0.0) == [young, dead]
        assert remove_orphans() == [dead]
        assert not dead.exists() and held.exists() and young.exists() and all(path.exists() for path in others)
    assert orphans() == [held]  # its rank has ended
    assert remove_orphans(0.0) == [young, held] and orphans(0.0) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--older-than", "soon"], "'soon'; expected seconds of at least 0"),
        (["--only", "MPI,weather"], "'weather'; expected some of MPI, environment"),
        (["--disk-bytes", "0"], "size '0'; expected bytes"),
        (["--repair"], "unrecognized arguments: --repair"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_a_port_counts_if_the_right_host_answers() -> None:
    token = b"0123456789abcdef"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=network.answer, args=(listener, token), daemon=True).start()
        port = listener.getsockname()[1]
        assert network.connects("127.0.0.1", port, token)
        assert not network.connects("127.0.0.1", port, token[::-1])  # another host with the same address
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    assert not network.connects("127.0.0.1", port, token)


@pytest.mark.rest
def test_sources_that_differ_are_found_before_mpi_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beforehand, "job_name", lambda: "job")
    folder = tmp_path / "runs/mine"  # is not made

    def compared(*their: beforehand.Sources | None) -> list[Finding | None]:
        """What each rank says; None: a rank that writes nothing."""
        monkeypatch.setattr(beforehand, "_WAIT_S", 0.2 if None in their else 10.0)
        own = threading.local()
        monkeypatch.setattr(beforehand, "own_sources", lambda: own.sources)
        ranks = [beforehand.Beforehand(folder, rank, len(their)) for rank in range(len(their))]

        def of(rank: int) -> Finding | None:
            own.sources = their[rank]
            return ranks[rank].compare()

        with ThreadPoolExecutor() as threads:
            found = list(threads.map(of, [rank for rank, its in enumerate(their) if its is not None]))
        for rank in reversed(ranks):
            rank.close()
        assert list(tmp_path.iterdir()) == []
        return found

    mine = beforehand.own_sources()
    other = mine._replace(code="0123", folder="/stale", host="node7")
    assert compared(mine, mine, mine._replace(folder="/copy", host="node2")) == [None] * 3
    assert compared(mine) == compared(mine, None) == [None]
    assert compared(None, mine, other) == [None, None]  # rank 0 prints the report, and waits in MPI
    for found in (compared(mine, mine, other), compared(mine, None, other)):
        (text,) = {finding.found for finding in found if finding is not None}
        assert (
            f"its sources on rank 2 on node7 ({mine.release} in /stale) differ from those on rank 0 on" in text
            and None not in found
        )
    assert {finding.level for finding in compared(mine, mine._replace(release="9")) if finding} == {Level.ERROR}
    monkeypatch.setattr(beforehand, "job_name", lambda: "")  # MPICH's mpirun names no job
    assert compared(mine, other) == [None, None]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[beforehand.Beforehand]:
    """The two ranks of a job, of two versions; a rank does not wait long for the other one."""
    sources = beforehand.own_sources()
    own = iter([sources, *[sources._replace(code="0123")] * 2])
    monkeypatch.setattr(beforehand, "job_name", lambda: "job")
    monkeypatch.setattr(beforehand, "own_sources", lambda: next(own))
    monkeypatch.setattr(beforehand, "_WAIT_S", 0.05)
    monkeypatch.setattr(beforehand.Daemon, "age_s", lambda self: 1.0)
    return [beforehand.Beforehand(tmp_path, rank, 2) for rank in range(2)]


def test_a_rank_that_comes_when_rank_0_waits_in_mpi_goes_there_too(
    job: list[beforehand.Beforehand], tmp_path: Path
) -> None:
    rank_0, rank_1 = job
    assert rank_0.compare() is None
    assert rank_1.compare() is None
    for rank in job:
        rank.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_differs_ends_when_rank_0_has_reported_it(
    is_late: bool, job: list[beforehand.Beforehand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_0, rank_1 = job
    monkeypatch.setattr(beforehand, "_WAIT_S", 10.0)
    with ThreadPoolExecutor() as threads:
        of_rank_0 = threads.submit(rank_0.compare)
        assert rank_1.compare() is not None
        of_rank_0.result()
        waits = threads.submit(rank_1.is_reported)
        time.sleep(0.03)
        assert not waits.done()
        if is_late:  # the file system has shown the file of rank 1 to rank 0 too late
            (file,) = tmp_path.glob("*-0")
            file.unlink()
        else:
            rank_0.close()
        assert waits.result() is not is_late


def test_files_of_a_killed_run_of_the_same_name_are_not_read(
    job: list[beforehand.Beforehand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_0, rank_1 = job
    assert rank_1.compare() is None  # of this job's name
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, time.time() - 3600.0))
    for job_s, is_found in ((7200.0, True), (60.0, False)):
        monkeypatch.setattr(beforehand.Daemon, "age_s", lambda self, job_s=job_s: job_s)
        assert (rank_0.compare() is not None) is is_found


def test_a_folder_in_which_no_file_can_be_made_costs_no_time(
    job: list[beforehand.Beforehand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert beforehand.existing(tmp_path / ("x" * 300) / "runs") == tmp_path
    (tmp_path / "file").touch()
    monkeypatch.setattr(beforehand, "_WAIT_S", 60.0)
    blocked = beforehand.Beforehand(tmp_path / "file", 0, 2)
    assert blocked.compare() is None
    blocked.close()
    without_size = beforehand.Beforehand(tmp_path, 2, 1)  # PRRTE's prterun tells no size
    assert without_size.compare() is None
    without_size.close()


def test_the_age_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert age_s(child.pid) < 1 < age_s(1)
        child.communicate(b"\n")
    assert age_s(child.pid) == float("inf")


def test_variables_that_name_places_of_another_host_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name, mode in (("open", 0o777), ("open/below", 0o700), ("sticky", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    monkeypatch.chdir(tmp_path)
    for name, value, said in (
        ("MPITRAIN_SHM_DIR", ".", "no full path"),
        ("MPITRAIN_SHM_DIR", f"{tmp_path}/file", "no folder"),
        ("MPITRAIN_PACK_DIR", f"{tmp_path}/none", "missing"),
        ("MPITRAIN_SHM_DIR", f"{tmp_path}/open", f"{tmp_path}/open belongs to user {os.getuid()}, mode 777"),
        ("MPITRAIN_PACK_DIR", f"{tmp_path}/open/below", "a sticky one"),
        ("MPITRAIN_PACK_DIR", f"{tmp_path}/sticky", None),
        ("MPITRAIN_LISTEN", "nosuch0,300.1.1.1", "interfaces"),
        ("MPITRAIN_LISTEN", "nosuch0,127.0.0.1", None),
        ("MPITRAIN_SHM_DIR", str(tmp_path), None),
        ("MPITRAIN_PACK_DIR", "", None),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            (found,) = judge_environment(ranks.environment())
        assert (found.level is Level.OK) == (said is None), (name, value)
        assert said is None or (name in found.found and value in found.found and said in found.found + found.expected)
