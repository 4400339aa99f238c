"""The main job: trains a model on bytes, sharded over all ranks; saves checkpoints, stops when asked, and continues later."""

import math
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

import ckpt
import collectives
from collectives import Communicator, recovery
from mpitrain.files import replace
from mpitrain.job.config import Config
from mpitrain.job.data.loading import DocumentSources, say_what_stays
from mpitrain.job.elastic.supervisor.batch import is_batch_job
from mpitrain.job.health import Bad, DesyncError, Health, InitialState, Reports, StatesOnDisk
from mpitrain.job.record.console import Terminal
from mpitrain.job.record.files.lines import is_evaluated
from mpitrain.job.record.files.marks import Reason, launch_number
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.record.heading import heading
from mpitrain.job.train import stop
from mpitrain.job.train.batches.losses import SourceLosses
from mpitrain.job.train.batches.totals import LossTotal
from mpitrain.job.train.checkpoints import saving
from mpitrain.job.train.checkpoints.meta import age_of
from mpitrain.job.train.checkpoints.newer import about_newer
from mpitrain.job.train.endurance import Endurance, Inheritance, Lasting, StatesInMemory
from mpitrain.job.train.evaluation import Evaluator
from mpitrain.job.train.hardware import Hardware, matmul_flops_per_s, take_hardware, with_threads
from mpitrain.job.train.observers import Observers
from mpitrain.job.train.passes import CommunicationClock
from mpitrain.job.train.run import TrainingRun
from mpitrain.job.train.sampling import write, written
from mpitrain.job.train.shared_folder import SharedFolder
from mpitrain.job.train.state import TrainingState
from mpitrain.job.train.steps.step import GoBackError, TrainStep
from mpitrain.job.train.workload import Workload, check_evaluation, check_settings
from mpitrain.placement.rank0 import on_rank0
from mpitrain.plans.draws import seed_all
from mpitrain.sharding.step.checks.same_inputs import not_compared
from mpitrain.weights.state import OnDisk

_SAMPLE_BYTES, _SAMPLE_S = 400, 30.0
"""Of the sample at the end of a run if the settings do not say its length: its length, and when it ends at the latest."""


class Trainer:
    """A run in progress on this rank. All methods are collective."""

    def __init__(self, config: Config, comm: Communicator, lasting: Lasting | None = None) -> None:
        """`lasting`: of an elastic run, which goes on in place after a loss of ranks (elastic/survive.py); None for another run."""
        self.config, self.comm, self._lasting = config, comm, lasting
        self.run = (
            TrainingRun(config)
            if lasting is None
            else TrainingRun(config, lasting.job, lasting.origin, lasting.first_lease)
        )
        check_settings(config, comm)
        self.hardware: Hardware = take_hardware(comm, with_threads(config))
        self._folder = SharedFolder(config, comm, self.run)
        check_evaluation(config, comm, has_start=self._folder.start is not None)

        work = Workload(config, comm, self.hardware, start=self._folder.start, lasting=lasting)
        self._work, self.mesh, self.batches = work, work.mesh, work.batches
        self.model, self.passes, self.optimizer = work.model, work.passes, work.optimizer
        self.stepper, self.diloco = work.stepper, work.diloco
        self._communication = CommunicationClock(self.model, self.passes)
        self.observers = Observers(
            config, comm, self.run, model=self.model, optimizer=self.optimizer, passes=self.passes, hardware=self.hardware,
            sources=self.batches.sources, communication_s=self._communication.seconds, total=self._sum,
        )  # fmt: skip
        self.monitor, self._say = self.observers.monitor, self.observers.say
        if lasting is not None and lasting.recovered is not None:
            self._folder.alive("recovering", 0)
        loss_total = LossTotal(work.slices, work.num_same)
        self.evaluator = Evaluator(
            config.train, self.batches, self.passes,
            SourceLosses(self.model, self.batches.heldout_sources, work.slices, figure="heldout_loss"),
            loss_total=loss_total, total=self._sum,
            knows_text=work.tokenizer is not None, is_alive=lambda: self._folder.alive("training", self.step),
        )  # fmt: skip
        self._endurance = (
            Inheritance(config, comm, self.run)
            if lasting is None
            else Endurance(config, comm, self.run, lasting, self._say)
        )
        seed_all(config.train.seed, work.seed_of)
        self.health = Health(
            config, comm, work.data, self.model, self.optimizer, self.batches.train,
            device=self.hardware.device, seed_of=work.seed_of,
            numbers=lambda: {"the stepper": str((self.stepper.state_dict(), self.stepper.loss_scale))},
            reports=Reports(self.run.write_event, comm.rank, self._say),
        )  # fmt: skip
        self.state = TrainingState(config, comm, work, self.health, lease=lambda: self._endurance.lease)
        self._steps = TrainStep(
            config, comm, work, health=self.health, observers=self.observers, folder=self._folder, loss_total=loss_total,
            total=self._sum,
        )  # fmt: skip
        self._source = ""
        self._start_step = 0  # of the first checkpoint
        self._is_in_copies_alone = False  # the first state, so that a checkpoint of it must be saved

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state.step

    # A step

    def train_step(self) -> tuple[StepMetrics, bool]:
        """One step of the optimizer; returns its metrics and whether any rank was asked to stop.

        The loss is the sum over the targets of the global batch that count, divided by their number; in local steps the gradient is
        that of the same mean over the copy's own targets. Ranks and micro-batches may have different numbers of them.
        """
        self.observers.begin_step(self.step + 1)
        try:
            batches = self.batches.of_step(self.step)
        except (ValueError, OSError) as error:
            self._save_the_steps_before(error)
            raise
        self.monitor.clock.lap("data")
        metrics, is_asked = self._steps.take(self.step, batches)
        self.state.step += 1
        return metrics, is_asked

    @property
    def _num_sampled(self) -> int:
        """The length of the sample."""
        asked = self.config.train.sample_bytes
        return asked if asked is not None else 0 if is_batch_job() else _SAMPLE_BYTES

    def sample(self) -> str:
        """The text that the model generates after the prompt; less of it if a rank is asked to stop, or if its length is the default
        and takes long."""
        train, tokenizer, num = self.config.train, self._work.tokenizer, self._num_sampled
        assert tokenizer is not None
        pieces = write(
            tokenizer, self.passes.last_logits, train.sample_prompt, num=num, context=self.model.config.context,
            temperature=train.sample_temperature, seed=train.seed, device=self.hardware.device,
        )  # fmt: skip
        limit_s = _SAMPLE_S if train.sample_bytes is None else math.inf
        return written(pieces, num=num, limit_s=limit_s, sum_of_ranks=self._sum, rank=self.comm.rank, say=self._say)

    # Checkpoints

    def save(self) -> None:
        """Save the state after the steps so far, perhaps in the background: see `ckpt.wait`."""
        began = time.perf_counter()
        self._folder.check_lock()
        self._folder.alive("saving", self.step)
        path = self.run.checkpoint(self.step)
        saving.write(path, self.state.collected(), self.config.checkpoint, self.run.check_lock)
        self.health.saved(self.step)
        self.monitor.saved(path, time.perf_counter() - began)
        self._folder.alive("training", self.step)

    def _save_the_steps_before(self, error: Exception) -> None:
        """Save the steps that are done, because the data of the next one cannot be read. Nothing of that step has changed the state."""
        saved = self.run.checkpoint(self.step)
        if collectives.on_all_ranks(error) and self.step and not on_rank0(self.comm, saved.exists):
            self.save()
            ckpt.wait()
            error.add_note(f"saved {saved}; the same command goes on from there")

    def load(self, path: Path | ckpt.Url) -> list[str]:
        """Load the state of a checkpoint. Returns lines about differences between then and now."""
        try:
            # A checkpoint of another run may have the name of one of this run's copies.
            copies = self.config.checkpoint.copies if self.config.resume == "auto" else ()
            is_own = isinstance(path, Path) and path.parent.resolve() == self.run.checkpoints.resolve()
            return self.state.load(OnDisk(path, copies), is_own=is_own)
        except ckpt.CheckpointError as error:
            error.add_note(f"--resume PATH takes another checkpoint (python -m ckpt ls {path.parent} shows them)")
            raise

    def _go_back(self, bad: Bad, error: BaseException) -> None:
        """Continue from the last good state, without the data of the bad steps. FloatingPointError without a good state."""
        self._folder.check_lock()
        self.optimizer.zero_grad(set_to_none=True)
        passes_over = self.health.is_at_dead_end
        step = self.health.go_back(bad)
        with self.comm.together():
            if step is None:
                raise FloatingPointError(f"{error}; the run has no earlier state to go back to")
            self.observers.went_back(step)
        self._endurance.went_back(self.step, self.state.collected)
        if passes_over:
            self.save()  # else a crash would lead back to the newest checkpoint, which the run has passed over

    # The whole run

    def fit(self) -> None:
        """Train to the last step, or until a rank is asked to stop. Evaluate, save and report during the training."""
        config = self.config
        is_rank0 = self.comm.rank == 0
        self.observers.listen()
        self.observers.terminal = Terminal(every=config.log.every, steps=config.train.steps) if is_rank0 else None
        try:
            if not config.train.eval_only:
                self._folder.take(self._say)
            self._restore()
            if config.train.eval_only:
                self.batches.check_evaluation()
                self.monitor.reached(self.step)
                evaluation = self.evaluator.evaluate()
                self._say(str(evaluation))
                self.monitor.evaluated(evaluation.metrics())
                self._mark_end("finished")
            else:
                self._mark_end("stopped" if self._fit() else "finished")
        except DesyncError as error:  # on all ranks
            self._endurance.distrust()
            self.monitor.failed(error)
            raise
        except BaseException as error:
            self._endurance.abandon()
            if not recovery.ranks_were_lost():
                self.monitor.failed(error)
            raise
        finally:
            self.batches.close()
            self.observers.close(goes_on=recovery.ranks_were_lost())
            if recovery.ranks_were_lost():  # the ranks that are left take the folder over
                self.run.let_go()
            else:
                self.run.release()
                self.run.end_alerts()
                if isinstance(self._work.found, DocumentSources):
                    say_what_stays(self.config.data, self._work.found.shards, speaks=self.comm.node.rank == 0)

    def _restore(self) -> None:
        """Load the state from which the run continues, or set the initial values, and print the heading."""
        lasting = self._lasting
        start = self._folder.start
        copies, step = None, 0
        if not self.config.train.eval_only:
            age = on_rank0(self.comm, lambda: age_of(start))
            copies, step = self._endurance.find(age), age.step
            self._is_in_copies_alone = copies is not None and (copies.step > step or lasting is None)
        is_recovery = lasting is not None and lasting.recovered is not None
        if not is_recovery:
            self._say(self._heading(self._folder.beginning if copies is None else f"goes on from {copies}"))
            folder = None if self.config.resume == "never" else self.run.folder
            if newer := on_rank0(self.comm, lambda: about_newer(start, folder)):
                self._say(newer)
        lines = []
        if copies is not None:
            lines, self._start_step = self.state.load(copies), step
        elif start is not None:
            lines = self.load(start)
            self._start_step = self.step
        elif not self._work.has_values:
            self.state.initialize()
        for line in [] if is_recovery else lines:
            self._say(line)
        # Its words alone: the copies would keep the memory of their files.
        self._source = str(copies or start or "its beginning")

    @not_compared()
    def _fit(self) -> bool:
        """Returns whether the run was asked to stop before its last step."""
        config, rank0 = self.config, self.comm.rank == 0
        due = self.step > 0 and self.evaluator.is_due(self.step)
        owed = on_rank0(self.comm, lambda: due and not is_evaluated(self.run.metrics, self.step))
        if self.step >= config.train.steps and not owed and not self._is_in_copies_alone:
            self._say(
                f"nothing left to do: {self.step} of {config.train.steps} steps are done; "
                "a larger --train.steps goes on from here, --resume never starts at step 0"
            )
            self._endurance.end()
            return False
        is_recovery = self._lasting is not None and self._lasting.recovered is not None
        self._folder.prepare(self._say)
        with self.comm.together():
            num_cut = self.monitor.open(self.step)
            if rank0 and config.resume == "auto" and num_cut and not is_recovery:
                self._say(
                    f"the previous job did {num_cut} more steps, which no checkpoint has: they are done again. "
                    "SIGUSR1 to mpirun, or Ctrl-C under mpirun/train, saves before the job ends"
                )
        if not is_recovery:
            self.batches.read_heldout()
        self._endurance.begin(self._source, self.step)
        begun_at = self.step
        with stop.interrupts_are_requests(rank=self.comm.rank):
            if owed:  # the previous job stopped between this step and its evaluation
                self._evaluate_and_report()
            stopped = self._train()
        if self.step > begun_at:
            self._report_passes()
        if self.step > begun_at or self._is_in_copies_alone:
            self._say(f"saved {self.run.checkpoint(self.step)}")
        self.observers.end_bar()
        if self.stepper.num_skipped:
            why = "their loss or gradient was not finite" + ", or a spike" * config.train.skip_spikes
            self._say(f"{self.stepper.num_skipped} of {self.step} steps were skipped: {why}")
        if stopped:
            self._say(f"stopped after step {self.step} as asked; the same command goes on from there")
        elif self._num_sampled and self._work.tokenizer is not None:
            self._say(f"making a sample of {self._num_sampled} bytes (train.sample_bytes 0: none)")
            self._say("sample:\n" + self.sample())
        return stopped

    def _mark_end(self, reason: Reason) -> None:
        """The mark of completion. A run that only evaluates changes nothing in its folder, unless its supervisor waits for the mark."""
        if not self.config.train.eval_only or launch_number():
            if not self.config.train.eval_only:
                self.monitor.end(reason)
            self._folder.done(reason, self.step)

    def _train(self) -> bool:
        """The steps, and the last checkpoint; returns whether a rank was asked to stop."""
        config, device = self.config, self.hardware.device
        own = self._lasting.flops_per_s if self._lasting is not None else 0.0
        own = own or matmul_flops_per_s(device, getattr(torch, config.parallel.param_dtype))
        if self._lasting is not None:
            self._lasting.flops_per_s = own
        self.observers.begin(self.mesh, source=self._source, peak_flops_per_s=self._sum(own)[0])
        stopped = False
        start = None if self._folder.start is None else (self._folder.start, self._start_step)
        self.health.begin(self.step)
        self.health.sources = [
            StatesInMemory(self._endurance.find_good, self.state.load),
            StatesOnDisk(self.comm, self.run.checkpoints, self.load, saved=self.health.reached, start=start),
        ]
        if start is None:
            self.health.sources.append(InitialState(self.state.start_over))
        if self._is_in_copies_alone and (self.step == config.train.steps or self._lasting is None):
            self._save_last()
        self._folder.alive("training", self.step)
        while self.step < config.train.steps and not stopped:
            self._endurance.before_step()
            self.observers.before_step(self.step + 1)
            try:
                metrics, stopped = self.train_step()
            except GoBackError as error:
                self._go_back(error.bad, error)
                continue
            self._folder.alive("training", self.step)
            self.observers.after_step(self.step, metrics)
            if self.evaluator.is_due(self.step) and not stopped:
                self._evaluate_and_report()
            if self._endurance.after_step(self.step, self.state.collected):
                self.health.copied(self.step)
            last = self.step == config.train.steps
            if stopped or last:
                self.observers.is_ending = True
                self._save_last()
            elif config.checkpoint.every and self.step % config.checkpoint.every == 0:
                self.save()
        self.observers.end()
        return stopped

    def _save_last(self) -> None:
        """Save the state with which the run ends."""
        self.save()
        self._folder.alive("saving", self.step)
        ckpt.wait()
        self._endurance.end()

    def _report_passes(self) -> None:
        """The timeline of the last steps, if there is a pipeline."""
        report = self.passes.report()
        if report is None:
            return
        line, picture = report
        file = self.run.folder / "pipeline.svg"
        self._folder.check_lock()
        with self.comm.together():
            if self.comm.rank == 0:
                replace(file, picture.encode())
        self._say(f"{line}\n{file} shows the last step beside the planned one")

    def _evaluate_and_report(self) -> None:
        with nullcontext() if self.diloco is None else self.diloco.swapped():
            found = self.evaluator.evaluate()
        self._folder.check_lock()
        self.monitor.evaluated(found.metrics())
        self._say(f"step {self.step}  {found}")

    def _heading(self, beginning: str) -> str:
        return heading(
            self.config, self._work.parallel, self.comm, self.model,
            device=self.hardware.device, threads=self.hardware.threads,
            num_idle=0 if self._lasting is None else self._lasting.num_idle,
            data=self._work.found, about_data=self._work.about_data, beginning=f"run {self.run.folder} {beginning}",
        )  # fmt: skip

    def _sum(self, *values: float) -> list[float]:
        """The sum of each value over the ranks, bit for bit the same on all ranks."""
        began = time.perf_counter()
        total: list[float] = self.comm.all_reduce(np.array(values, np.float64)).tolist()
        self._communication.more_s += time.perf_counter() - began
        return total
