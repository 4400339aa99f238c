"""The supervisor's pure parts: words of commands, lists of hosts, time limits, decisions; and the marks, which the ranks write."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import is_open_mpi, job_environment

from collectives import launcher
from mpitrain.job.elastic.supervisor import hosts, words
from mpitrain.job.elastic.supervisor.agents import Answer, choose_agent, parse_agent, probe, sweep
from mpitrain.job.elastic.supervisor.decisions import LaunchOutcome, LaunchProgress, Policy, decide
from mpitrain.job.elastic.supervisor.elastic_command import main
from mpitrain.job.elastic.supervisor.folder import RunFolder
from mpitrain.job.elastic.supervisor.hosts import Host
from mpitrain.job.elastic.supervisor.launch.limits import LaunchWatch, PhaseLimits
from mpitrain.job.elastic.supervisor.texts import say
from mpitrain.job.record.files import marks
from mpitrain.job.record.files.alerts import Alerts
from mpitrain.job.record.files.marks import Alive, Done, Marks
from mpitrain.job.record.parsing.events import read_events

ROOT = Path(__file__).parents[3]
TRAIN = ("python", "-m", "mpitrain", "--run", "a/b", "-x", "1")


def test_the_standard_library_is_enough() -> None:
    """A head node may have nothing else. -I and -S: neither site-packages nor this folder; the tree stands alone on the path."""
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; sys.argv = ['mpitrain', 'elastic', '--help']\n"
    )
    script += "runpy.run_module('mpitrain', run_name='__main__')"
    found = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stderr
    assert "--max-relaunches" in found.stdout


# Hosts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a:2,b:4", [("a", 2), ("b", 4)]),
        ("a,b,a", [("a", 2), ("b", 1)]),
        ("10.0.0.1:3", [("10.0.0.1", 3)]),
    ],
)
def test_hosts_of_a_list(text: str, found: list[Host]) -> None:
    assert hosts.parse_list(text) == found
    assert hosts.parse_list(hosts.as_list(hosts.parse_list(text))) == found


@pytest.mark.parametrize("text", ["a,,b", ":2", "", "a:"])
def test_a_wrong_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected hosts such as node1:4,node2:4, got"):
        hosts.parse_list(text)


NO_NAMES = [
    "-oProxyCommand=x",
    "-x:2",
    "a,-b",
    "-u@x",
    "u@-x",
    "a;b",
    "$(x)",
    "`x`",
    "a{host}",
    "a/b",
    "a'b",
    "a=b",
    "a\x1b[0m",
    "é",
]


@pytest.mark.parametrize("text", NO_NAMES)
def test_a_name_that_is_no_host_is_refused_wherever_it_comes_from(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"node1\n{text} slots=2\n".replace("a,-b", "-b"))
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\nsed -n '2s/ .*//p' {file}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for find in (
        lambda: hosts.parse_list(text),
        lambda: hosts.parse_file(file.read_text()),
        lambda: words.parse(["mpirun", "-H", text, "-np", "2", "python"], "openmpi"),
        lambda: words.parse(["mpirun", f"--host={text}", "python"], "openmpi"),
        lambda: words.parse(["mpirun", "--hostfile", str(file), "python"], "openmpi"),
        lambda: hosts.of_environment({"PBS_NODEFILE": str(file)}),
        lambda: hosts.of_environment({"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "2"}),
        lambda: hosts.of_environment({"SLURM_JOB_NODELIST": "-M"}),
    ):
        with pytest.raises(ValueError, match="expected names of hosts, such as node"):
            find()


@pytest.mark.parametrize("name", ["node-1.site", "u.v@n_1", "[fe80::1]", "10.0.0.1", "x.", "a-", "+n0"])
def test_names_of_hosts(name: str) -> None:
    assert hosts.parse_list(f"{name}:2,other") == [(name, 2), ("other", 1)]


def test_hosts_of_files() -> None:
    assert hosts.parse_file("# all\nnode1 slots=4 max_slots=8\n\nnode2 # one\n") == [("node1", 4), ("node2", 1)]
    assert hosts.parse_file("n1:2\nn2:3\n") == [("n1", 2), ("n2", 3)]
    assert hosts.parse_file("n1\nn1\nn2\n") == [("n1", 2), ("n2", 1)], "as in $PBS_NODEFILE"


def test_hosts_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts.expand_tasks("4(x2),3") == [4, 4, 3]
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),3"}
    assert hosts.of_environment(job) == [("n1", 4), ("n2", 4), ("n3", 3)]
    with pytest.raises(ValueError, match="names 3 nodes, but SLURM_TASKS_PER_NODE has 1"):
        hosts.of_environment(job | {"SLURM_TASKS_PER_NODE": "4"})


@pytest.mark.parametrize(
    ("asked", "chosen", "ranks"),
    [(8, 2, 8), (8, 1, 4), (6, 1, 4), (4, 1, 4), (16, 2, 16), (16, 1, 8), (None, 1, None), (1, 1, 1)],
)
def test_the_number_of_ranks_follows_the_slots(asked: int | None, chosen: int, ranks: int | None) -> None:
    everything = [Host("a", 4), Host("b", 4)]
    assert hosts.num_ranks(asked, everything, everything[:chosen]) == ranks


def test_hosts_are_chosen_in_the_order_of_the_list() -> None:
    everything = [Host("a", 1), Host("b", 1), Host("c", 1)]
    assert hosts.choose(everything, ["c", "a"], None) == [("a", 1), ("c", 1)]
    assert hosts.choose(everything, ["c", "b", "a"], 2) == [("a", 1), ("b", 1)]


# Words


def test_a_command_of_open_mpi_on_other_hosts() -> None:
    given = ("mpirun", "--mca", "btl", "tcp", "-H", "a:2,b:2", "-x", "NAME", "-np", "4", "--with-ft", "ulfm", *TRAIN)
    command = words.parse(given, "openmpi")
    assert (command.hosts, command.ranks, command.program) == ((("a", 2), ("b", 2)), 4, TRAIN)
    assert command.words() == list(given)
    fewer = command.on([Host("b", 2)], 2).words()
    assert fewer == [
        "mpirun",
        "-H",
        "b:2",
        "-np",
        "2",
        "--mca",
        "btl",
        "tcp",
        "-x",
        "NAME",
        "--with-ft",
        "ulfm",
        *TRAIN,
    ]
    assert command.with_options("-x", "MORE").words()[1:3] == ["-x", "MORE"]
    assert words.run_folder(command.program) == Path("a/b")


def test_a_command_of_mpich_and_files(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a:2\nb:2\n")
    command = words.parse(["mpiexec", "-f", str(file), "-n", "4", "-launcher-exec", "my ssh", *TRAIN], "mpich")
    assert (command.hosts, command.ranks) == ((("a", 2), ("b", 2)), 4)
    assert command.on([Host("a", 2)], 2).words() == [
        "mpiexec",
        "-hosts",
        "a:2",
        "-np",
        "2",
        "-launcher-exec",
        "my ssh",
        *TRAIN,
    ]
    assert words.agent_of(command, {}) == "my ssh"


def test_the_agent_is_the_launcher_s() -> None:
    def agent(*options: str, **environ: str) -> str:
        return words.agent_of(words.parse(["mpirun", *options, *TRAIN], "openmpi"), environ)

    assert agent() == "ssh"
    assert agent("--mca", "plm_rsh_agent", "/x/ssh -q : rsh") == "/x/ssh -q"
    assert agent(PRTE_MCA_plm_ssh_agent="/y/ssh") == "/y/ssh"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["mpirun", "-np", "x", "python"], "-np: expected a number of ranks from 1, got 'x'"),
        (["mpirun", "-np", "2"], "expected a program after the options"),
        (["mpirun", "-H", "a:1", "one", ":", "two"], "expected one program"),
        (["mpirun", "--hostfile", "/nowhere", "python"], "--hostfile /nowhere: No such file"),
    ],
)
def test_wrong_words_are_refused(given: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        words.parse(given, "openmpi")


def test_settings_come_from_flags_or_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('run = "of/file"\nresume = "never"\n[train]\nsteps = 3\n')
    assert words.run_folder([]) == Path("runs/default")
    assert words.run_folder(["--config", str(file)]) == Path("of/file")
    assert words.run_folder(["--config", str(file), "--run=x", "--run", "y"]) == Path("y")
    assert words.resume_of([f"--config={file}"]) == "never"
    with pytest.raises(ValueError, match="settings file"):
        words.run_folder(["--config", str(tmp_path / "none")])
    file.unlink()
    assert words.resume_of([f"--config={file}"]) == "never", "read once"
    pipe, device = tmp_path / "pipe", Path("/dev/null")
    os.mkfifo(pipe)
    for odd in (pipe, device, tmp_path):
        with pytest.raises(
            ValueError, match=f"settings file {odd}: expected a regular file, because each launch reads it"
        ):
            words.on_event_of(["--config", str(odd)])


# Decisions


def test_pauses_grow() -> None:
    assert [Policy(pause_s=1, max_pause_s=6).pause(n) for n in range(1, 7)] == [0, 1, 2, 4, 6, 6]


def test_relaunches_end_without_a_new_step_and_are_counted_anew_with_one() -> None:
    policy, progress = Policy(max_relaunches=2), LaunchProgress()
    for step, failures in ((10, 1), (10, 2), (11, 1), (9, 2)):
        following = decide(policy, progress, LaunchOutcome(None, step))
        progress = following.progress
        assert (following.action, progress.failures) == ("launch", failures)
    last = decide(policy, progress, LaunchOutcome(None, 11))
    assert (last.action, last.code) == ("end", 1)
    assert "giving up after 2 relaunches without a new step" in last.text


@pytest.mark.parametrize(
    ("outcome", "action", "code"),
    [
        (LaunchOutcome(Done(1, "finished", 9), 9), "end", 0),
        (LaunchOutcome(Done(1, "stopped", 5), 5, "user"), "end", 0),
        (LaunchOutcome(Done(1, "stopped", 5), 5), "end", 0),  # its ranks got the signal themselves
        (LaunchOutcome(Done(1, "stopped", 5), 5, "rejoin"), "launch", 0),
        (LaunchOutcome(Done(1, "finished", 9), 9, "rejoin"), "end", 0),
        (LaunchOutcome(Done(1, "refused", 0), 0), "end", 1),
        (LaunchOutcome(None, 5, "user"), "end", 1),
        (LaunchOutcome(None, 5, "rejoin"), "launch", 0),
        (LaunchOutcome(None, 5), "launch", 0),
    ],
)
def test_only_a_mark_of_completion_ends_well(outcome: LaunchOutcome, action: str, code: int) -> None:
    following = decide(Policy(), LaunchProgress(), outcome)
    assert (following.action, following.code) == (action, code)
    counted = outcome.done is None and action == "launch"
    assert following.progress.failures == counted


def test_settings_that_do_not_fit_the_ranks_that_are_left_do_not_end_the_run() -> None:
    """As train.batch = 16 on 12 ranks, after 16 ranks have trained."""
    refused = LaunchOutcome(Done(1, "refused", 0), 0, is_reduced=True)
    assert decide(Policy(), LaunchProgress(), refused).action == "end", "it has never trained"
    following = decide(Policy(), LaunchProgress(best_step=30), refused)
    assert (following.action, following.progress) == ("launch", LaunchProgress(1, 30))
    assert following.text == "the settings do not fit the ranks that are left; relaunch 1 of at most 10 now"
    assert decide(Policy(), LaunchProgress(best_step=30), refused._replace(is_reduced=False)).action == "end"


# Time limits


def alive(phase: marks.Phase, step: int, launch: int = 3) -> Alive:
    return Alive(launch, phase, step, "host", 1)


def test_each_phase_has_its_limit() -> None:
    limits = PhaseLimits(launch_s=5, start_s=50, step_s=10, save_s=100, recover_s=20, report_s=4)
    watch = LaunchWatch(limits, 3, now=0.0)
    assert watch.see(4.9, "old", alive("training", 7, launch=2), None) == "", "another launch's mark"
    assert watch.see(5.1, "old", alive("training", 7, launch=2), None) == "no rank has started within 5 s"
    for now, phase, step, limit_s in ((6.0, "starting", 0, 50), (60.0, "training", 20, 10), (70.0, "saving", 21, 100)):
        mark = alive(phase, step)  # type: ignore[arg-type]
        assert watch.see(now, now, mark, None) == ""
        assert watch.see(now + limit_s - 0.1, now, mark, None) == ""
        assert watch.see(now + limit_s + 0.1, now, mark, None).endswith(f"within {limit_s} s")
        assert not watch.trains
    assert watch.see(200.0, 200, alive("training", 22), None) == ""
    assert watch.trains, "20 was where it began"


def test_after_a_report_the_job_ends_or_goes_on() -> None:
    limits = PhaseLimits(step_s=100, report_s=4, recover_s=20)
    watch = LaunchWatch(limits, 3, now=0.0)
    watch.see(1.0, 1, alive("training", 7), None)
    assert watch.see(2.0, 1, alive("training", 7), "report") == ""
    assert "has not ended" in watch.see(6.5, 1, alive("training", 7), "report")
    assert watch.see(7.0, 2, alive("recovering", 7), "report") == "", "it goes on in place"
    assert watch.see(26.0, 2, alive("recovering", 7), "report") == ""
    assert watch.see(27.5, 2, alive("recovering", 7), "report") != ""
    assert watch.see(28.0, 3, alive("training", 8), "report") == ""
    assert watch.see(120.0, 3, alive("training", 8), "report") == "", "that report is over"
    assert watch.see(121.0, 3, alive("training", 8), "report", is_done=True) == ""
    assert watch.see(132.0, 3, alive("training", 8), "report", is_done=True) == ""
    assert "complete, and the job has not ended" in watch.see(133.5, 3, alive("training", 8), "report", is_done=True)


# Marks and the run's folder


def test_marks_are_of_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    for name, value in folder.prepare("me").items():
        monkeypatch.setenv(name, value)
    marks.starting()
    first, mark = folder.sign_of_life()
    assert mark is not None and mark[:3] == (1, "starting", 0) and mark.pid == os.getpid()
    run = Marks(str(folder.path))
    run.alive("training", 4)
    run.alive("training", 5)
    run.alive("training", 6)  # within half a second
    second, mark = folder.sign_of_life()
    assert first != second and mark is not None and mark.step == 5
    assert folder.done() is None
    run.done("finished", 6)
    assert folder.done() == (1, "finished", 6)
    folder.prepare("me")
    assert (folder.launch, folder.done()) == (2, None), "the mark of launch 1 says nothing about launch 2"
    assert RunFolder(folder.path).launch == 2, "another supervisor goes on"
    run.begin()
    assert not (folder.path / marks.DONE).exists()


def test_no_other_rank_and_no_run_alone_marks_its_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(marks.FOLDER_VARIABLE, str(tmp_path))
    marks.starting()
    monkeypatch.setenv(marks.LAUNCH_VARIABLE, "1")
    monkeypatch.setenv("PMIX_RANK", "1")
    marks.starting()
    assert list(tmp_path.iterdir()) == []
    assert set(marks.RANK_VARIABLES) == {each.rank for each in launcher._LAUNCHERS}


def test_a_run_goes_on_from_its_own_checkpoints_alone(tmp_path: Path) -> None:
    places = tmp_path / "checkpoints"
    (places / "step-00000500").mkdir(parents=True)
    folder = RunFolder(tmp_path)
    assert folder.own_start() is None, "of an earlier run"
    (places / "step-00000020").mkdir()
    assert folder.own_start() == str(places / "step-00000020"), "auto would take 500"
    (places / "step-00000520").mkdir()
    assert folder.own_start() == "auto"


def test_a_run_that_was_moved_aside_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints/step-00000500").mkdir(parents=True)
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "run.1")
    (tmp_path / "run/checkpoints/step-00000020").mkdir(parents=True)
    assert folder.own_start() == "auto"


def test_the_lock_of_an_ended_launch_is_broken_and_no_other(tmp_path: Path) -> None:
    folder, lock = RunFolder(tmp_path), tmp_path / ".lock"
    record = {"host": "far", "pid": 7, "start": "5", "token": "theirs", "place": "there"}
    lock.write_text(json.dumps(record))
    folder.break_lock(Alive(1, "training", 3, "far", 8))
    assert json.loads(lock.read_text()) == record, "another job's"
    folder.break_lock(Alive(1, "training", 3, "far", 7))
    assert json.loads(lock.read_text())["token"] != "theirs"
    assert lock.stat().st_mtime < time.time() - 600, "stale at once"
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_the_lock_of_a_process_that_has_ended_on_this_host_is_removed(tmp_path: Path) -> None:
    held = "import os, sys; from pathlib import Path; from mpitrain.job.record.files.folder_lock import FolderLock; "
    held += "FolderLock(Path(sys.argv[1])); print(os.getpid(), flush=True); sys.stdin.read(); os._exit(1)"
    folder, lock = RunFolder(tmp_path), tmp_path / ".lock"
    command = [sys.executable, "-c", held, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        ended = Alive(1, "training", 3, os.uname().nodename, int(job.stdout.readline()))
        record = lock.read_text()
        folder.break_lock(ended)
        assert json.loads(lock.read_text())["token"] != json.loads(record)["token"], (
            "of a live process: stale, but there"
        )
        lock.write_text(record)
        job.communicate(timeout=20)
    folder.break_lock(ended)
    assert not lock.exists(), "nobody holds it, so the next job takes it at once"


# Agents


@pytest.mark.rest
def test_agents_of_users_and_batch_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_agent("ssh -p 22").command("far", 0, "a 'b'") == [
        "ssh",
        "-p",
        "22",
        "far",
        "sh -c 'a '\"'\"'b'\"'\"''",
    ]
    assert parse_agent("srun -w {host}").command("far", 0, "a") == ["srun", "-w", "far", "sh", "-c", "a"]
    assert parse_agent("ssh").command("localhost", 0, "a") == ["sh", "-c", "a"], "this host needs no agent"
    with pytest.raises(ValueError, match="expected the words of a command"):
        parse_agent("")
    # PBS: a stand-in for pbsdsh that knows two tasks
    pbsdsh = tmp_path / "pbsdsh"
    pbsdsh.write_text('#!/bin/sh\n[ "$1 $3" = "-n --" ] || exit 2\n[ "$2" = 2 ] || exec sleep 30\nshift 3\nexec "$@"\n')
    pbsdsh.chmod(0o755)
    nodes = tmp_path / "nodes"
    nodes.write_text("p1\np1\np2\np2\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    job = {"PBS_NODEFILE": str(nodes)}
    assert hosts.of_environment(job) == [("p1", 2), ("p2", 2)]
    agent = choose_agent("ssh", job)
    began = time.monotonic()
    assert probe(agent, ["p1", "p2"], 1.0, {"p1": 0, "p2": 2}) == ["p2"]
    assert time.monotonic() - began < 5
    assert choose_agent("my-ssh", {}).words[0] == "my-ssh"


def test_the_programs_of_ranks_do_not_have_the_id_by_which_processes_are_ended(tmp_path: Path) -> None:
    assert set(marks.VARIABLES) | RunFolder(tmp_path).prepare("me").keys() <= launcher.OF_JOB


def test_the_sweep_ends_what_has_the_mark_and_nothing_else() -> None:
    def sleeper(mark: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], env={**os.environ, marks.SUPERVISOR_VARIABLE: mark})

    mine, other = sleeper(f"one-{os.getpid()}"), sleeper(f"one-{os.getpid()}0")
    try:
        answers = sweep(parse_agent("false"), ["far"], f"one-{os.getpid()}", [], 10.0, {})
        assert answers == {"localhost": Answer(1)}
        assert mine.wait(5) == -9
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


@pytest.mark.rest
def test_the_sweep_lets_a_command_of_an_event_come_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the copy of a checkpoint, which a rank has started before it died."""
    with monkeypatch.context() as rank:
        rank.setenv(marks.SUPERVISOR_VARIABLE, f"one-{os.getpid()}")
        environment = launcher.environment_of_program()
    alerts = Alerts(f"cd {tmp_path}; touch begun; sleep 1; touch done", tmp_path, print, environment=environment)
    alerts.tell({"event": "end"})
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    assert sweep(parse_agent("false"), [], f"one-{os.getpid()}", [], 10.0, {}) == {"localhost": Answer(0)}
    alerts.close()
    assert (tmp_path / "done").exists()


def test_without_enough_hosts_the_supervisor_waits_and_then_gives_up(tmp_path: Path) -> None:
    words = ["--run", str(tmp_path), "--agent", "false", "--hosts-timeout", "0.2", "--nodes", "2"]
    mpirun, settings = job_environment(2)
    job = [mpirun, "-H" if is_open_mpi() else "-hosts", "far1,far2", "-np", "2", *TRAIN]
    command = [sys.executable, "-m", "mpitrain", "elastic", *words, "--", *job]
    env = settings | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "elastic: no answer within 5 s from far1, far2",
        "elastic: expected at least 2 hosts, and none answers; waiting up to 0.2 s for more",
        "elastic: expected at least 2 hosts, and none answers within 0.2 s; giving up",
    ], result.stderr
    (event,) = read_events(tmp_path)
    assert event["event"] == "failure" and event["problem"].endswith("none answers within 0.2 s")


def test_errors_and_reports_have_no_secrets_and_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--", "https://u:S3CRET/x@h/\x1b[2Jrun"]) == 2
    assert capsys.readouterr().err.startswith("elastic: error: https://***@h/\\x1b[2Jrun is not found: ")
    with pytest.raises(SystemExit):
        main(["https://u:S3CRET@h/\x1b[2Ja"])
    assert "error: unrecognized arguments: https://***@h/\\x1b[2Ja\n" in capsys.readouterr().err
    say("東京\u3000https://h/a?key=S3CRET \r")
    assert capsys.readouterr().err == "elastic: 東京\u3000https://h/a?key=*** \\r\n"
    folder = RunFolder(tmp_path)
    folder.prepare("me")
    (tmp_path / "failure.txt").write_text("now\n\tError: https://u:S3CRET@h/\x1b[2Ja\n")
    assert folder.report_text() == "now\n\tError: https://***@h/\\x1b[2Ja"


def test_the_supervisor_imports_the_standard_library_alone() -> None:
    """-S: without the folder of packages. Some modules of collectives need no package, and are loaded without their own."""
    modules = ("addresses", "cgroup", "files", "secret_forms", "secret_tokens", "texts")
    names = "sorted(name for name in sys.modules if name.partition('.')[0] in ('collectives', 'numpy'))"
    code = f"import sys, mpitrain.job.elastic.supervisor.elastic_command; print(*{names})"
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=30
    )
    assert (result.stdout, result.stderr) == (f"collectives.{' collectives.'.join(modules)}\n", "")
    names = f"(getattr(collectives, name).__name__ for name in {modules})"
    code = f"import mpitrain.job.elastic.supervisor.elastic_command, collectives; print(*{names})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == result.stdout
