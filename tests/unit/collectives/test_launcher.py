"""What launchers tell their ranks, and whether that fits what MPI says."""

import multiprocessing
import os
import socket

import pytest

from collectives.launcher import (
    LAUNCHER_PREFIXES,
    OF_JOB,
    check_launcher,
    check_main_program,
    check_no_child,
    environment_of_program,
    launched_rank,
    launched_size,
    launcher_name,
    leave_mark,
)

TASK = {"SLURM_TASK_PID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["Open MPI's mpirun has started 2 ranks", "env -u OMPI_COMM_WORLD_SIZE"]),
        (
            {"PMI_SIZE": "3"},
            ["MPICH's family has started 3 ranks (PMI_SIZE=3)", "which knows 1 rank", "mpirun of Some MPI 1.2"],
        ),
        # by --mpi=pmi2
        (
            {"PMI_SIZE": "4", **TASK},
            ["srun has started 4 ranks", "--mpi=pmix", "env -u SLURM_STEP_NUM_TASKS -u PMI_SIZE"],
        ),
        (TASK, ["srun has started 4 ranks (SLURM_STEP_NUM_TASKS=4)", "--mpi=pmix"]),
    ],
)
def test_several_ranks_that_are_each_alone_are_refused(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(RuntimeError) as refusal:
        check_launcher(1, "Some MPI 1.2", environ)
    assert all(part in str(refusal.value) for part in words), refusal.value
    check_launcher(2, "Some MPI 1.2", environ)  # they have found each other


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_SIZE": "1"},
        {"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "many"},
        {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0"},  # salloc, or a batch script without srun
        {**TASK, "SLURM_TASK_PID": str(os.getppid())},  # started by a task of srun, perhaps to run alone
        {**TASK, "OMPI_COMM_WORLD_SIZE": "1"},  # mpirun -np 1, whose daemon is a task of srun on each node
        {"PMI_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_that_may_be_meant_to_run_alone_goes_on(environ: dict[str, str]) -> None:
    check_launcher(1, "Some MPI 1.2", environ)


TORCH = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
TORCHRUN = {**TORCH, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            TORCHRUN,
            ["torchrun has started 2 processes (TORCHELASTIC_RUN_ID=none, RANK=1", "Some MPI", "mpirun -np 2 python "],
        ),
        ({**TORCHRUN, "ACCELERATE_USE_CPU": "true"}, ["accelerate launch has started 2", "mpirun -np 2 "]),
        ({**TORCHRUN, "WORLD_SIZE": "8"}, ["mpirun -np 8 -H HOST:2,... python"]),
        (
            TORCH,
            [
                "such as deepspeed, has started 2",
                "mpirun -np 2 ",
                "env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u MASTER_ADDR",
            ],
        ),
        ({"TORCHELASTIC_RUN_ID": "job"}, ["torchrun has started the processes", "mpirun -np N python"]),
        (
            {**TORCHRUN, "OMPI_COMM_WORLD_SIZE": "1"},
            ["torchrun has started 2"],
        ),  # mpirun -np 1 torchrun, and the reverse
        ({**TORCH, **TASK, "SLURM_TASK_PID": str(os.getppid())}, ["such as deepspeed, has started 2"]),  # srun torchrun
    ],
)
def test_processes_of_torch_s_launchers_are_no_ranks(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(RuntimeError) as refusal:
        check_launcher(1, "Some MPI 1.2", environ)
    assert all(part in str(refusal.value) for part in words), refusal.value
    assert "\n" not in str(refusal.value)
    check_launcher(
        2, "Some MPI 1.2", environ
    )  # mpirun has started the ranks, and a script sets these variables for torch


@pytest.mark.parametrize(
    "environ",
    [
        {**TORCHRUN, "WORLD_SIZE": "1"},  # one process, which is one rank
        {**TORCH, "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},  # of Kubernetes
        {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "host", "MASTER_PORT": "1"},
        {**TORCH, "WORLD_SIZE": "many"},
    ],
)
def test_some_variables_of_torch_are_no_launcher(environ: dict[str, str]) -> None:
    check_launcher(1, "Some MPI 1.2", environ)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--log.on_event", "curl S3CRET", "--run", "a"], "--log.on_event '***' --run a"),
        (["--log.on-event", "--S3CRET", "S3CRET", "--run", "a"], "--log.on-event '***' --run a"),
        (["--log.on_event=curl S3CRET", "--run", "a"], "'--log.on_event=***' --run a"),
        (["--log.on-event=S3CRET=S3CRET", "S3CRET"], "'--log.on-event=***'"),
        (["--log.on_event", "S3CRET", "--log.on-event=S3CRET"], "--log.on_event '***' '--log.on-event=***'"),
        (["--run", "a", "--log.on_event"], "--run a --log.on_event"),
    ],
)
def test_the_command_of_alerts_is_not_told(monkeypatch: pytest.MonkeyPatch, words: list[str], shown: str) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python3", "-m", "mpitrain", *words])
    with pytest.raises(RuntimeError) as refusal:
        check_launcher(1, "Some MPI 1.2", TORCHRUN)
    assert f"mpirun -np 2 python -m mpitrain {shown}. To run" in str(refusal.value)


def test_the_command_is_the_program_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "-u", "-m", "mpitrain", "--run", "my run"])
    with pytest.raises(RuntimeError, match=r"mpirun -np 2 python -m mpitrain --run 'my run'. To run one process alone"):
        check_launcher(1, "Some MPI 1.2", TORCHRUN)
    for words, shown in (
        ("-u x.py --local_rank=3 -u me", "x.py -u me"),
        ("-X dev -u -m package.x --local-rank=0 --local_rank=1", "-X dev -m package.x --local_rank=1"),
        ("-u -c code --local_rank=1", "-c code"),
        ("x.py", "x.py"),
        ("-u", ""),
    ):
        monkeypatch.setattr("sys.orig_argv", ["python3", *words.split()])
        with pytest.raises(RuntimeError, match=f"mpirun -np 2 python {shown}".rstrip() + r"\. To run"):
            check_launcher(1, "Some MPI 1.2", TORCHRUN)
    monkeypatch.setattr("sys.orig_argv", ["python3", "-c", "x" * 1000])
    with pytest.raises(RuntimeError) as refusal:
        check_launcher(1, "Some MPI 1.2", TORCHRUN)
    assert "xxx .... To run" in str(refusal.value) and len(str(refusal.value)) < 800


def test_the_launcher_has_a_name() -> None:
    assert launcher_name({}) == launcher_name({"PMI_SIZE": "many"}) == ""
    assert launcher_name({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_VERSION": "5.0.11"}) == "Open MPI's mpirun 5.0.11"
    assert launcher_name({"PMI_SIZE": "2", "OMPI_VERSION": "5.0.11"}) == "an mpirun of MPICH's family"


def task(rank: int, size: int) -> dict[str, str]:
    """The variables of a task of srun."""
    return {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size)}


@pytest.mark.parametrize(
    ("environ", "rank", "size", "name"),
    [
        ({}, -1, 1, ""),
        (task(1, 3), 1, 3, "srun"),
        ({**task(1, 3), "PMIX_RANK": "1"}, 1, 3, "srun"),
        ({**task(1, 3), "PMI_RANK": "1", "PMI_SIZE": "3"}, 1, 3, "srun"),
        ({"PMIX_RANK": "2"}, 2, 1, ""),
        ({"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "3"}, 2, 3, "MVAPICH's mpirun"),
        # mpirun within a step of srun, and in a batch script
        *(
            ({**step, rank_variable: "1", size_variable: "2"}, 1, 2, name)
            for rank_variable, size_variable, name in (
                ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
                ("PMI_RANK", "PMI_SIZE", "an mpirun of MPICH's family"),
            )
            for step in (task(0, 1), task(0, 2), task(1, 4), task(3, 4), {"SLURM_PROCID": "0"})
        ),
        ({**task(0, 4), "PMIX_RANK": "2"}, 2, 1, ""),
    ],
)
def test_rank_and_size_are_of_one_launcher(
    environ: dict[str, str], rank: int, size: int, name: str, no_launcher: pytest.MonkeyPatch
) -> None:
    for variable, value in environ.items():
        no_launcher.setenv(variable, value)
    assert (launched_rank(), launched_size(), launcher_name()) == (rank, size, name)


def test_a_program_knows_nothing_of_the_ranks_but_may_start_steps(no_launcher: pytest.MonkeyPatch) -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEPMGR": "host", "MV2_ENABLE_AFFINITY": "0", "RANKS": "x"}
    before = environment_of_program()
    for variable, value in {**kept, **TORCHRUN, "MASTER_PORT": "1", **task(1, 4), "SLURM_STEPID": "0"}.items():
        no_launcher.setenv(variable, value)
    for variable in ("PALS_APID", "MV2_COMM_WORLD_RANK", *OF_JOB):
        no_launcher.setenv(variable, "7")
    assert environment_of_program() == {**before, **kept}


def test_a_spawned_process_that_imports_the_main_program_starts_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    check_main_program()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match='under `if __name__ == "__main__":`'):
        check_main_program()


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*os.environ,):
        if name.startswith((*LAUNCHER_PREFIXES, "MPITRAIN_RANK", "SLURM", "RANK", "MASTER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MPITRAIN_RANK_PROCESS", "")  # so that it is as before in the end
    return monkeypatch


def in_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be another one, which has inherited the environment."""
    monkeypatch.setattr(os, "getpid", lambda: 1)


def test_what_a_rank_starts_is_no_rank(no_launcher: pytest.MonkeyPatch) -> None:
    for name, value in {"PMIX_NAMESPACE": "prterun-host-7@1", "PMIX_RANK": "3"}.items():
        no_launcher.setenv(name, value)
    check_no_child()
    leave_mark()
    check_no_child()
    assert launched_rank() == 3
    parent = os.getpid()
    in_child(no_launcher)
    with pytest.raises(
        RuntimeError, match=rf"\(process 1\) was started by a rank \(process {parent}\).*environment_of_program"
    ):
        check_no_child()
    assert launched_rank() == -1
    with no_launcher.context() as clean:  # as the remedy says
        for name in os.environ.keys() - environment_of_program():
            clean.delenv(name)
        check_no_child()
    no_launcher.setenv("PMIX_NAMESPACE", "prterun-host-9@1")  # a nested mpirun, or MPI_Comm_spawn
    check_no_child()
    assert launched_rank() == 3


def test_what_a_rank_of_mpich_starts_is_no_rank(no_launcher: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        no_launcher.setenv("PMI_FD", str(ours.fileno()))
        leave_mark()
        check_no_child()
        in_child(no_launcher)
        with pytest.raises(RuntimeError, match="started by a rank"):  # with all descriptors
            check_no_child()
        no_launcher.setenv("PMI_FD", str(theirs.fileno()))  # of a nested mpirun
        check_no_child()
        no_launcher.setenv("PMI_FD", "9999")  # the usual child, which inherits no descriptor
        with pytest.raises(RuntimeError, match="started by a rank"):
            check_no_child()
        no_launcher.delenv("PMI_FD")
        check_no_child()


def test_without_a_launcher_a_program_may_start_another(no_launcher: pytest.MonkeyPatch) -> None:
    leave_mark()
    in_child(no_launcher)
    check_no_child()
    no_launcher.setenv("MPITRAIN_RANK_PROCESS", "what the user has set")
    check_no_child()
