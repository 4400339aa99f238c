"""A run's folder: where it begins, and that looking changes nothing."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckpt
from mpitrain.job.config import Config, ConfigError, differences, from_toml
from mpitrain.job.config.settings import CheckpointConfig
from mpitrain.job.elastic.lease import Lease, as_text, first_number, raise_lease
from mpitrain.job.record.files.marks import DONE, Marks
from mpitrain.job.record.parsing.events import read_events
from mpitrain.job.train.run import TrainingRun


def config(folder: Path, resume: str = "auto") -> Config:
    return Config(run=str(folder), resume=resume)


def save(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step-{step:08d}"
    return ckpt.save(path, {"x": np.arange(3.0)}, comm=None, meta={"step": step})


def test_without_a_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    for folder in (tmp_path / "run", tmp_path):
        assert TrainingRun(config(folder)).start(config(folder)) == (None, "starts at step 0")
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_the_newest_and_says_what_it_passes_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    second, third = save(tmp_path, 2), save(tmp_path, 3)
    run = TrainingRun(config(tmp_path))
    assert run.start(config(tmp_path)) == (third, f"goes on from {third}")
    (third / "manifest.jsonl").write_text("")
    start, said = run.start(config(tmp_path))
    assert start == second and said.startswith(f"goes on from {second}; step-00000003 is damaged: ")
    for damaged in (tmp_path / "checkpoints").glob("step-*"):
        (damaged / "manifest.jsonl").write_text("")
    with pytest.raises(ckpt.CheckpointError, match="no other checkpoint that is complete"):
        run.start(config(tmp_path))


def test_what_a_later_save_may_not_replace_is_an_error_at_once(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    back = config(tmp_path, str(first))
    assert TrainingRun(back).start(back) == (first, f"goes on from {first}")
    (second / "notes.txt").write_text("the best one")
    with pytest.raises(ConfigError, match=r"step-00000002 holds 'notes.txt'.*move it away"):
        TrainingRun(back).start(back)
    auto, looks = config(tmp_path), replace(back, train=replace(back.train, eval_only=True))
    assert TrainingRun(auto).start(auto)[0] == second and TrainingRun(looks).start(looks)[0] == first
    beyond = replace(back, train=replace(back.train, steps=1))
    assert TrainingRun(beyond).start(beyond)[0] == first
    # What counts is the step that it is of, not its name.
    second.rename(tmp_path / "best")
    best = config(tmp_path, str(tmp_path / "best"))
    (first / "notes.txt").write_text("")
    assert TrainingRun(best).start(best)[0] == tmp_path / "best"
    (tmp_path / "best").rename(second)
    # A folder of that name need not be a checkpoint.
    third = tmp_path / "checkpoints/step-00000003"
    third.mkdir()
    assert TrainingRun(auto).start(auto)[0] == second
    (third / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="step-00000003"):
        TrainingRun(auto).start(auto)


def test_a_checkpoint_is_found_by_its_run_its_folder_and_itself(tmp_path: Path) -> None:
    newest = save(tmp_path, 1)
    for path in (tmp_path, tmp_path / "checkpoints", newest):
        assert ckpt.find(path) == newest
    with pytest.raises(ckpt.CheckpointError, match="does not exist"):
        ckpt.find(tmp_path / "none")


def test_never_moves_earlier_runs_aside_one_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for earlier in range(3):
        never = config(folder, "never")
        assert TrainingRun(never).start(never) == (None, "starts at step 0")
        run = TrainingRun(never)
        run.lock()
        assert run.prepare(never) == (tmp_path / f"run.{earlier}" if earlier else None)
        run.release()
        save(folder, earlier)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    assert [path.name for path in (tmp_path / "run.2/checkpoints").glob("step-*")] == ["step-00000001"]


def test_prepare_writes_the_settings_down(tmp_path: Path) -> None:
    settings = replace(config(tmp_path / "run"), resume="never")
    run = TrainingRun(settings)
    run.lock()
    run.prepare(settings)
    run.release()
    assert differences(from_toml(tmp_path / "run/config.toml"), settings) == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "config.toml", "events.jsonl"]


def test_a_folder_that_cannot_be_written_is_found_early(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = config(tmp_path / "file/run")
    for call in (lambda: TrainingRun(inside).start(inside), TrainingRun(inside).lock):
        with pytest.raises(OSError, match=r"the folder .*file/run cannot be written"):
            call()
    # evaluating writes nothing, and needs no such folder
    only = replace(inside, train=replace(inside.train, eval_only=True))
    assert TrainingRun(only).start(only)[0] is None


def test_a_folder_that_another_job_trains_in_is_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "run.1"
    settings = config(folder)
    never = replace(settings, resume="never")
    first, second = TrainingRun(settings), TrainingRun(settings)
    folder.mkdir()
    first.failure.write_text("of an earlier job")
    first.lock()
    assert not first.failure.exists()
    first.failure.write_text("of the job that holds it")
    for run in (second, TrainingRun(never)):
        with pytest.raises(ConfigError, match=f"run is being trained by process {os.getpid()} on .*; wait for its end"):
            run.lock()
    second.release()  # of a job that was refused
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "failure.txt"]
    first.failure.unlink()
    first.release()
    assert not folder.exists()
    save(folder, 1)
    second = TrainingRun(never)
    second.lock()
    assert second.prepare(never) == other
    with pytest.raises(ConfigError, match="is being trained"):
        first.lock()
    assert not second.is_lost() and not (other / ".lock").exists()
    second.release()


def test_copies_are_gone_on_from_and_never_taken_for_the_new_run_s(tmp_path: Path) -> None:
    home, place = tmp_path / "run", tmp_path / "copies"
    auto, never = (
        replace(config(home, resume), checkpoint=CheckpointConfig(copies=(str(place),))) for resume in ("auto", "never")
    )
    assert TrainingRun(never).start(never) == (None, "starts at step 0")
    path = ckpt.save(home / "checkpoints/step-00000001", {"x": np.ones(3)}, comm=None, copies=[place])
    assert TrainingRun(auto).start(auto) == (path, f"goes on from {path}")
    shutil.rmtree(home)
    assert TrainingRun(auto).start(auto) == (place / path.name, f"goes on from {place / path.name}")
    with pytest.raises(ConfigError, match=f"checkpoint.copies: {place / path.name} is there from an earlier run"):
        TrainingRun(never).start(never)
    with pytest.raises(ConfigError, match=r"checkpoint.copies: expected folders or URLs, got \('',\)"):
        CheckpointConfig(copies=("",))


def test_after_a_loss_a_run_without_a_state_of_its_own_begins_at_its_origin(tmp_path: Path) -> None:
    origin, own = save(tmp_path / "other", 7), tmp_path / "run"
    auto = config(own)
    run = TrainingRun(auto, "job", str(origin))
    assert run.start(auto) == (origin, f"goes on from {origin}")
    first = save(own, 9)
    assert run.start(auto) == (first, f"goes on from {first}")
    (first / "manifest.jsonl").write_text("")
    with pytest.raises(ckpt.CheckpointError, match="no other checkpoint that is complete"):
        run.start(auto)


def test_a_job_whose_lease_was_raised_writes_nothing(tmp_path: Path) -> None:
    run = TrainingRun(config(tmp_path))
    run.lock()
    first = run.take_lease()
    run.check_lock()
    run.write_event("spike", step=1)
    marks = Marks(tmp_path, may_write=lambda: not run.is_lost())
    assert raise_lease(tmp_path) == (first.run, first.number + 1)  # by a later launch
    assert run.is_lost()
    run.write_event("spike", step=2)
    marks.done("finished", 2)
    assert [event["step"] for event in read_events(tmp_path)] == [1] and not (tmp_path / DONE).exists()
    with pytest.raises(
        RuntimeError, match=r"belongs to another job now: its lease has number 2, and this job has number 1"
    ):
        run.check_lock()
    run.release()


def test_states_of_which_jobs_are_the_supervisor_s() -> None:
    own, other = Lease("a", 7), Lease("b", 5)
    assert first_number(own, None) == 7, "without a supervisor this job's alone"
    assert first_number(own, as_text(Lease("a", 5))) == 6
    assert first_number(own, as_text(other)) == 1, "the supervisor began with a run that was moved aside"
    assert first_number(own, as_text(None)) == 1


def test_the_settings_of_a_resume_are_for_this_user_alone_if_they_have_secrets(tmp_path: Path) -> None:
    """From the first byte on: the file has its mode before it has its name. Without secrets the umask decides."""
    settings = config(tmp_path)
    secret = replace(settings, log=replace(settings.log, on_event="curl https://user:key@host"))
    old = os.umask(0o022)
    try:
        for its, mode in ((settings, 0o644), (secret, 0o600), (settings, 0o644)):
            run = TrainingRun(its)
            run.lock()
            run.prepare(its)
            run.release()
            assert (tmp_path / "config.toml").stat().st_mode & 0o777 == mode
    finally:
        os.umask(old)


@pytest.mark.parametrize("name", ["config.toml", "events.jsonl"])
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir() if name == "config.toml" else os.mkfifo(path)
    run = TrainingRun(config(tmp_path))
    run.lock()
    try:
        with pytest.raises(OSError, match=f"run: the folder {tmp_path} cannot be written: {path}: "):
            run.prepare(config(tmp_path))
    finally:
        run.release()
