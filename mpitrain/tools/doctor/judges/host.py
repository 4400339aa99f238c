"""Judges the folders of one host: node memory, the run's disk, temporary files. Pure: facts in, findings out."""

from collectives.texts import show_bytes
from mpitrain.tools.doctor.findings import Finding, Level, ok
from mpitrain.tools.doctor.host import Disk, Leftovers, Memory, Most, Temporary
from mpitrain.tools.doctor.packages import Need

_SMALL_MEMORY = 1 << 30  # a small model's full parameters and gradients
_TINY_MEMORY = 64 << 20  # what docker gives a container
_SPARE = 0.1  # of the predicted need of a run
_SMALL_DISK = 1 << 30
_SLOW_DISK = 20e6
_MAX_SOCKET_PATH = 60  # characters of TMPDIR: the path of a socket has 107, and MPI appends some forty


def judge_memory(its: Memory, need: Need | None = None) -> list[Finding]:
    """The folder of node memory: that it works, is in memory, and has room."""
    where = f"{its.folder} ({its.kind}), {show_bytes(its.free)} of {show_bytes(its.total)} free"
    larger = f"mount -o remount,size=50% {its.folder}; docker run --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with "
    larger += "medium: Memory; or set MPITRAIN_SHM_DIR to another folder in memory"
    if its.failure:
        other = "see its permissions (/dev/shm: chmod 1777), or let MPITRAIN_SHM_DIR name another folder in memory"
        full = f"python -m mpitrain doctor --clean removes old copies; {larger}"
        return [
            Finding(
                Level.ERROR,
                "node memory",
                f"cannot make a file of 1 MiB in {its.folder}: {its.failure}; {show_bytes(its.free)} free",
                "a folder in memory that this user may write to",
                full if "space" in its.failure.lower() else other,
            )
        ]
    wanted = need.shared if need else 0
    if wanted and its.free < wanted:
        return [
            Finding(Level.ERROR, "node memory", where, f"{show_bytes(wanted)} for the settings of this run", larger)
        ]
    if its.total < _SMALL_MEMORY or its.free < _TINY_MEMORY:
        expected = f"{show_bytes(_SMALL_MEMORY)} or more (python -m mpitrain memory --np N tells what a run needs)"
        return [Finding(Level.WARNING, "node memory", where, expected, larger)]
    if its.kind not in ("tmpfs", "ramfs", "hugetlbfs", "unknown"):
        return [
            Finding(
                Level.WARNING,
                "node memory",
                f"{where}: a disk, so shared arrays are written to it",
                "a file system in memory (tmpfs)",
                "unset MPITRAIN_SHM_DIR, or mount a tmpfs: mount -t tmpfs -o size=16g tmpfs DIR",
            )
        ]
    known = f"; a run with these settings needs {show_bytes(wanted)}" if wanted else ""
    return [ok("node memory", where + known)]


def judge_need(its: Need, most: Most) -> list[Finding]:
    """Whether the need of a run is known, and within the memory of the host or the limit of its cgroup."""
    if not its.failure:
        return [_judge_total(its.total, most)] if its.total else []
    return [
        Finding(
            Level.NOTE,
            "need of the run",
            f"not known: {its.failure}",
            "settings of a run whose memory can be predicted",
            "python -m mpitrain memory --help",
        )
    ]


def _judge_total(need: int, most: Most) -> Finding:
    """The need of a run against the memory that its host gives it."""
    of = "the limit of the cgroup" if most.of_cgroup else "the memory of this host"
    room = most.nbytes - need
    words = f"a run with these settings needs {show_bytes(need)} on a host, "
    words += f"{'more than' if room < 0 else 'and'} {of}{',' if room < 0 else ' is'} {show_bytes(most.nbytes)}"
    if room >= _SPARE * need:
        return ok("need of the run", words)
    more = "ask for more memory (Slurm: --mem, docker: --memory)" if most.of_cgroup else "take hosts with more memory"
    return Finding(
        Level.ERROR if room < 0 else Level.WARNING,
        "need of the run",
        words + ": the kernel's OOM killer would end ranks" * (room < 0),
        f"{show_bytes((1 + _SPARE) * need)} or more, as the need is a prediction",
        f"{more}, or start fewer ranks on a host; python -m mpitrain memory --np N shows what takes it, and settings that take less",
    )


def judge_leftovers(its: Leftovers) -> list[Finding]:
    """Files of dead jobs."""
    findings = []
    if its.removed:
        more = f" and {len(its.removed) - 1} more" if len(its.removed) > 1 else ""
        text = f"removed {_copies(its.removed)}, {show_bytes(its.copy_bytes)}: {its.removed[0]}{more}"
        findings.append(ok("old copies", text))
    if kept := [path for path in its.copies if path not in its.removed]:
        findings.append(
            Finding(
                Level.NOTE,
                "old copies",
                f"{_copies(kept)}, {show_bytes(its.copy_bytes)}, such as {kept[0]}",
                f"none that are unused for {its.older_than_s / 3600:g} h",
                "python -m mpitrain doctor --clean, unless you will start that run again",
            )
        )
    if its.others:
        rm = "rm -r" if any(path.endswith("/") for path in its.others) else "rm"
        findings.append(
            Finding(
                Level.NOTE,
                "old files",
                f"{len(its.others)} file{'s' * (len(its.others) > 1)} of ended jobs, {show_bytes(its.other_bytes)}, "
                f"such as {its.others[0]}",
                "none",
                f"if no other container uses them: {rm} {' '.join(its.others[:3])}{' ...' if its.others[3:] else ''}",
            )
        )
    if its.packs:
        findings.append(
            Finding(
                Level.NOTE,
                "old files",
                f"{len(its.packs)} unpacked environment{'s' * (len(its.packs) > 1)} in which no process runs, "
                f"{show_bytes(its.pack_bytes)}, such as {its.packs[0]}",
                "none after the last job",
                f"bash FILE remove, with the file of the pack; or, while no job starts: rm -r {' '.join(its.packs[:3])}"
                f"{' ...' if its.packs[3:] else ''}",
            )
        )
    if its.sessions:
        findings.append(
            Finding(
                Level.NOTE,
                "old files",
                f"{len(its.sessions)} folder{'s' * (len(its.sessions) > 1)} as of killed mpiruns, such as {its.sessions[0]}",
                "none: an mpirun that gets the process id NUMBER of a folder ompi.NUMBER does not start (PMIx server's listener)",
                "look into them first: a name does not tell whose a folder is; if they are an mpirun's, and no other container or host "
                f"uses them: rm -r {' '.join(its.sessions[:3])}{' ...' if its.sessions[3:] else ''}",
            )
        )
    return findings or [ok("old copies", f"no files of dead runs (unused for {its.older_than_s / 3600:g} h)")]


def _copies(paths: list[str]) -> str:
    return f"{len(paths)} cop{'ies' if len(paths) > 1 else 'y'} of dead runs"


def judge_disk(its: Disk) -> list[Finding]:
    """The file system of the run's folder."""
    where = f"{its.folder} ({its.kind})"
    if its.failure:
        return [
            Finding(
                Level.ERROR,
                "folder",
                f"{where}: {its.failure}; {show_bytes(its.free)} free",
                "a folder in which files can be written, flushed, renamed and read back",
                "choose another folder by --run DIR, make room, or see its permissions",
            )
        ]
    speed = (
        f"{where}: writes {its.write_speed / 1e6:,.0f} MB/s with fsync, reads {its.read_speed / 1e6:,.0f} MB/s (of "
        f"{show_bytes(its.written)}), {show_bytes(its.free)} free"
    )
    findings = []
    if its.kind in ("tmpfs", "ramfs"):
        findings.append(
            Finding(
                Level.WARNING,
                "folder",
                f"{where} is in memory",
                "a disk: a checkpoint must outlive a restart",
                "--run DIR",
            )
        )
    elif its.free < _SMALL_DISK:
        findings.append(
            Finding(
                Level.WARNING,
                "folder",
                speed,
                f"{show_bytes(_SMALL_DISK)} free or more",
                "remove old checkpoints (checkpoint.keep), or choose another folder by --run DIR",
            )
        )
    elif its.write_speed < _SLOW_DISK:
        findings.append(
            Finding(
                Level.WARNING,
                "folder",
                speed,
                f"{_SLOW_DISK / 1e6:g} MB/s or more",
                "choose a faster file system, or save in the background (--checkpoint.background true)",
            )
        )
    else:
        findings.append(ok("folder", speed))
    if not its.locks:
        findings.append(
            Finding(
                Level.WARNING,
                "file locks",
                f"{its.folder}: a second lock of a file is not refused",
                "flock works, so that two launches cannot write to one run",
                "mount it with locks (NFS: local_lock=none; Lustre: -o flock)",
            )
        )
    if not its.links:
        findings.append(
            Finding(
                Level.NOTE,
                "hard links",
                f"not possible in {its.folder}; equal files of checkpoints are copied",
                "hard links",
                "no remedy is needed",
            )
        )
    return findings


def judge_temporary(its: Temporary) -> list[Finding]:
    """The folder for temporary files."""
    remedy = "export TMPDIR=/tmp, or another short path on a local disk that this user may write to"
    if its.failure:
        level, found = Level.ERROR, f"no socket can be made in {its.folder}: {its.failure}"
    elif its.free < 100 << 20:
        level, found = Level.WARNING, f"{its.folder}: {show_bytes(its.free)} free"
    elif len(its.folder) > _MAX_SOCKET_PATH:
        level, found = Level.WARNING, f"{its.folder} has {len(its.folder)} characters; mpirun's sockets may not fit"
    else:
        return [ok("temporary files", f"{its.folder}, {show_bytes(its.free)} free")]
    expected = f"100 MiB free in a folder of at most {_MAX_SOCKET_PATH} characters, for MPI's sockets"
    return [Finding(level, "temporary files", found, expected, remedy)]
