"""The main job: trains a model on bytes, sharded over all ranks; saves checkpoints, stops when asked, and continues later."""

import math
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import ckpt
import collectives
from ckpt.saving.mpio import mpio_error
from collectives import Communicator, recovery
from mpitrain.axes import mesh
from mpitrain.config import Config, ConfigError, ParallelConfig, check_ranks
from mpitrain.data.loading import load_data, speed_up
from mpitrain.data.streaming.feed import tell
from mpitrain.data.tokenizers import load_tokenizer
from mpitrain.elastic.marks import Marks, Reason, launch_number
from mpitrain.health import Bad, DesyncError, Health, InitialState, Reports, StatesOnDisk
from mpitrain.init import initialize
from mpitrain.models import num_parameters
from mpitrain.monitor.console import Terminal
from mpitrain.monitor.heading import about_messages
from mpitrain.monitor.record.lines import is_evaluated
from mpitrain.monitor.record.metrics import StepMetrics
from mpitrain.monitor.sinks import check_sinks
from mpitrain.rank0 import on_rank0
from mpitrain.sharding.slices.api import seed_all
from mpitrain.sharding.unit.registry import compression_of, slices_of
from mpitrain.train import saving, stop
from mpitrain.train.batches.losses import SourceLosses
from mpitrain.train.batches.rank_batches import RankBatches
from mpitrain.train.batches.totals import LossTotal
from mpitrain.train.endurance import Endurance, Inheritance, Lasting, StatesInMemory
from mpitrain.train.evaluation import Evaluator
from mpitrain.train.hardware import Hardware, matmul_flops_per_s, take_hardware
from mpitrain.train.lr import learning_rate
from mpitrain.train.model import make_diloco, make_model, make_optimizer
from mpitrain.train.observers import Observers
from mpitrain.train.passes import CommunicationClock
from mpitrain.train.run import Run
from mpitrain.train.sampling import write
from mpitrain.train.stepper import Stepper
from mpitrain.weights.state import Collected, OnDisk, Source


class _GoBackError(Exception):
    """A step was not finite, and the run may go back. All ranks raise it."""

    def __init__(self, bad: Bad) -> None:
        super().__init__(bad.why)
        self.bad = bad


class Trainer:
    """A run in progress on this rank. All methods are collective."""

    def __init__(self, config: Config, comm: Communicator, lasting: Lasting | None = None) -> None:
        """`lasting`: of an elastic run, which goes on in place after a loss of ranks (elastic/survive.py); None for another run."""
        self.config, self.comm, self._lasting = config, comm, lasting
        self.run = Run(config) if lasting is None else Run(config, lasting.job, lasting.origin, lasting.first_lease)
        with comm.together():
            check_ranks(config, comm.size)
        with comm.together():
            check_sinks(config.log.sinks)
            # Each rank checks its node before the first collective operation that depends on the result.
            if config.parallel.device == "cuda" and not torch.cuda.is_available():
                raise ConfigError("parallel.device: cuda was asked for, but torch sees no GPU here; choose auto or cpu")
            if config.checkpoint.driver != "posix" and (problem := mpio_error(comm.mpi)):
                raise ConfigError(f"checkpoint.driver: {problem}")
        self.hardware: Hardware = take_hardware(comm, self._with_threads(config))
        self._begin()  # an early check; `fit` repeats it, because other jobs can change the folder until then
        if on_rank0(comm, self.run.is_free):
            self._report_into_folder()
        with comm.together():
            if config.train.eval_only and self.start is None and config.resume == "auto":
                raise ConfigError(
                    f"train.eval_only: run {self.run.folder} has no checkpoint to evaluate; choose another with --run or "
                    "--resume, or evaluate the initial values with --resume never"
                )
            if config.train.eval_only and not config.train.eval_batches:
                raise ConfigError("train.eval_only: train.eval_batches is 0, so there is nothing to do")

        known = None if lasting is None else lasting.found
        self.found = load_data(config.data, comm, batch=config.train.batch) if known is None else known
        with comm.together():
            self.tokenizer = load_tokenizer(config.data, vocab=config.model.resolve().vocab)
        self._about_engines = speed_up(self.tokenizer, self.found, config.data, comm, seed=config.train.seed)
        if lasting is not None:
            lasting.found = self.found
        parallel = config.parallel
        self.mesh = mesh(comm, tp=parallel.tensor, pp=parallel.pipeline, dp_replicate=parallel.copies)
        self.data = self.mesh["dp_replicate", "dp_shard", "cp"]
        """The ranks that share a global batch."""
        with comm.together():
            self.batches = RankBatches(
                config, self.found, self.data, device=self.hardware.device, tokenizer=self.tokenizer, all_ranks=comm,
                same=self.mesh["pp", "tp"], say=tell,
            )  # fmt: skip
            if config.train.eval_only and not self.batches.heldout.num_batches:
                raise ConfigError(
                    "train.eval_only: no data are held out; expected data.heldout above 0, or data.heldout_sources"
                )
        # A load gives the model its values if there is a checkpoint, and most likely after a loss of ranks.
        self._has_values = self.start is None and (lasting is None or lasting.recovered is None)
        self.parallel = saving.settle_wires(parallel, comm, self.start)
        """The settings, with the wire formats that are used."""
        self.model, self.passes = make_model(
            replace(config, parallel=self.parallel), self.mesh, self.hardware.device, has_values=self._has_values
        )
        self.slices = slices_of(self.model)
        self._loss_total = LossTotal(self.slices, comm.size // self.data.size)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.stepper = Stepper(self.model, self.optimizer, config)
        self.step = 0
        # Only weights are loaded to evaluate: the outer parameters.
        self.diloco = None if config.train.eval_only else make_diloco(self.model, config.parallel)
        self._communication = CommunicationClock(self.model, self.passes)
        self.observers = Observers(
            config, comm, self.run, model=self.model, optimizer=self.optimizer, passes=self.passes, hardware=self.hardware,
            sources=self.batches.sources, communication_s=self._communication.seconds, total=self._sum,
        )  # fmt: skip
        self.monitor, self._say = self.observers.monitor, self.observers.say
        self.marks = Marks(self.run.folder, active=comm.rank == 0, may_write=lambda: not self.run.is_lost())
        if lasting is not None and lasting.recovered is not None:
            self.marks.alive("recovering", self.step)
        self.evaluator = Evaluator(
            config.train, self.batches, self.passes,
            SourceLosses(self.model, self.batches.heldout_sources, self.slices, figure="heldout_loss"),
            loss_total=self._loss_total, total=self._sum,
            knows_text=self.tokenizer is not None, is_alive=lambda: self.marks.alive("training", self.step),
        )  # fmt: skip
        self._endurance = (
            Inheritance(config, comm, self.run)
            if lasting is None
            else Endurance(config, comm, self.run, lasting, self._say)
        )
        self._source = ""
        self._start_step = 0  # of the first checkpoint
        self._is_in_copies_alone = False  # the first state, so that a checkpoint of it must be saved
        # The ranks of `tp` have the same numbers; two stages of a pipeline have not.
        self._seed_of = self.data.rank + self.data.size * self.mesh["pp"].rank
        seed_all(config.train.seed, self._seed_of)
        self._first_stepper = self.stepper.state_dict()
        self.health = self._make_health()

    def _make_health(self) -> Health:
        """The checks of silent faults."""
        return Health(
            self.config,
            self.comm,
            self.data,
            self.model,
            self.optimizer,
            self.batches.train,
            device=self.hardware.device,
            seed_of=self._seed_of,
            numbers=lambda: {"the stepper": str((self.stepper.state_dict(), self.stepper.loss_scale))},
            reports=Reports(self.run.write_event, self.comm.rank, self._say),
        )

    def _report_into_folder(self) -> None:
        """From now on reports of a hang or a failure are written into the run's folder. A supervisor adds the event by itself."""
        self.run.token = on_rank0(self.comm, lambda: self.run.token)
        if not os.environ.get("MPITRAIN_RECORD_DIR"):
            collectives.set_record_folder(self.run.folder / "flight-record", self.run.may_report)
        tell = None if launch_number() else self.run.write_failure_event
        collectives.set_failure_file(self.run.failure, tell, self.run.may_report)

    def _begin(self) -> None:
        """Find the checkpoint from which the run continues, if there is one."""
        self.start, self.beginning = on_rank0(self.comm, lambda: self.run.start(self.config))

    # A step

    def train_step(self) -> tuple[StepMetrics, bool]:
        """One step of the optimizer; returns its metrics and whether any rank was asked to stop.

        The loss is the sum over the targets of the global batch that count, divided by their number; in local steps the gradient is
        that of the same mean over the copy's own targets. Ranks and micro-batches may have different numbers of them.
        """
        config, observers, clock = self.config, self.observers, self.monitor.clock
        observers.begin_step(self.step + 1)
        try:
            batches = self.batches.of_step(self.step)
        except (ValueError, OSError) as error:
            self._save_the_steps_before(error)
            raise
        clock.lap("data")
        # The ranks of `tp` and `pp` have the same targets: the sums of targets and of losses both count each target once for each.
        # Those of each copy: in local steps a gradient is the mean over one copy's ranks.
        num_copies, copy = (1, 0) if self.diloco is None else (self.diloco.num_copies, self.diloco.copy)
        counted = [sum(batch.num_counted for batch in batches) * (number == copy) for number in range(num_copies)]
        num_padding, *counted_by_copy = self._sum(sum(batch.num_padding for batch in batches), *counted)
        num_counted = sum(counted_by_copy)
        # The weight of a loss: the gradient is the mean over the ranks that train as one.
        if self.diloco is not None and self.diloco.is_local:
            weight = self.comm.size / num_copies / max(counted_by_copy[copy], 1)
        elif self.slices is not None:  # a gradient is the mean over the slices
            weight = self.slices.count / max(num_counted * self.data.size / self.comm.size, 1)
        else:
            weight = self.comm.size / max(num_counted, 1)
        lr = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        with observers.passing():
            losses = self.passes.train(batches, lambda loss: self.stepper.scale(loss * weight), clock)
        self.batches.prepare(self.step + 1)  # a GPU computes meanwhile
        clock.lap("data")
        observers.after_backward(self.stepper.loss_scale)
        grad_norm, loss_scale = self.stepper.clip(), self.stepper.loss_scale
        clock.lap("optimizer")
        # One message sums the losses of the global batch, the requests to stop, whether rank 0 lost the folder, odd norms, and the
        # squares of norms.
        is_odd = self.health.is_odd(grad_norm)
        asked, lost, odd, squares, num_damaged, *sums = self._sum(
            stop.requested(),
            self.run.is_lost(),
            is_odd,
            grad_norm * grad_norm,
            self.batches.num_damaged(),
            *self._loss_total.values(batches, losses),
            *observers.values(batches),
        )
        of_losses, observed = sums[: self._loss_total.num_values], sums[self._loss_total.num_values :]
        if self.diloco is not None and self.diloco.is_local:
            # Each copy has its own norm, and all ranks decide by the same one.
            grad_norm = math.sqrt(squares / self.comm.size)
        observers.met(observed, is_lost=lost > 0)
        mean = self._loss_total.total(of_losses) / num_counted if num_counted else math.nan
        if lost:
            self._check_lock()
        self.batches.check_damaged(int(num_damaged))
        skips = self.health.before_step(self.step, mean, grad_norm, is_odd=odd > 0, is_last=asked > 0)
        clock.lap("check")
        try:
            taken = self.stepper.step(mean, grad_norm, number=self.step + 1, is_empty=not num_counted, skip=skips)
        except FloatingPointError as error:
            if (bad := self.health.may_go_back(self.step, str(error))) is not None:
                raise _GoBackError(bad) from error
            with self.comm.together():  # every rank has the same numbers
                raise error from None
        if self.diloco is not None:
            self.diloco.step()  # also after a skipped step, so that its number alone decides
            if self.step + 1 == config.train.steps:
                self.diloco.outer_step()
        clock.lap("optimizer")
        self.health.after_step(self.step, taken=taken)
        clock.lap("check")
        self.step += 1
        tokens = config.train.batch * self.model.config.context
        metrics = observers.end_step(
            self.step, loss=mean, lr=lr, grad_norm=grad_norm, loss_scale=loss_scale, skipped=not taken,
            rows=sum(len(batch.tokens) for batch in batches),
            padding=num_padding / (tokens * self.comm.size / self.data.size) if self.batches.is_padded else None,
        )  # fmt: skip
        return metrics, asked > 0

    def sample(self) -> str:
        """The text that the model generates after the prompt."""
        train = self.config.train
        assert self.tokenizer is not None
        text = write(
            self.tokenizer,
            self.passes.last_logits,
            train.sample_prompt,
            num=train.sample_bytes,
            context=self.model.config.context,
            temperature=train.sample_temperature,
            seed=train.seed,
            device=self.hardware.device,
        )
        return "".join(text)

    # Checkpoints

    def save(self) -> None:
        """Save the state after the steps so far, perhaps in the background: see `ckpt.wait`."""
        began = time.perf_counter()
        self._check_lock()
        self.marks.alive("saving", self.step)
        path = self.run.checkpoint(self.step)
        saving.write(path, self._collected(), self.config.checkpoint, self.run.check_lock)
        self.health.saved(self.step)
        self.monitor.saved(path, time.perf_counter() - began)
        self.marks.alive("training", self.step)

    def _save_the_steps_before(self, error: Exception) -> None:
        """Save the steps that are done, because the data of the next one cannot be read. Nothing of that step has changed the state."""
        saved = self.run.checkpoint(self.step)
        if collectives.on_all_ranks(error) and self.step and not on_rank0(self.comm, saved.exists):
            self.save()
            ckpt.wait()
            error.add_note(f"saved {saved}; the same command goes on from there")

    def _collected(self) -> Collected:
        return saving.collect(
            self.model,
            self.optimizer,
            config=self.config,
            parallel=self.parallel,
            comm=self.comm,
            step=self.step,
            next_sample=self.batches.train.next_sample(self.step),
            stepper=self.stepper.state_dict(),
            health=self.health.state_dict(),
            fingerprint=self.found.fingerprint,
            data=self.batches.state(self.step),
            lease=self._endurance.lease,
            hardware=self.hardware.described(),
        )

    def load(self, path: Path | ckpt.Url) -> list[str]:
        """Load the state of a checkpoint. Returns lines about differences between then and now."""
        optimizer = None if self.config.train.eval_only else self.optimizer
        try:
            # A checkpoint of another run may have the name of one of this run's copies.
            copies = self.config.checkpoint.copies if self.config.resume == "auto" else ()
            is_own = isinstance(path, Path) and path.parent.resolve() == self.run.checkpoints.resolve()
            return self._take(OnDisk(path, copies), optimizer, is_own=is_own)
        except ckpt.CheckpointError as error:
            error.add_note(f"--resume PATH takes another checkpoint (python -m ckpt ls {path.parent} shows them)")
            raise

    def _take(self, source: Source, optimizer: torch.optim.Optimizer | None, *, is_own: bool = True) -> list[str]:
        """Load the state of a source. Returns lines about differences between then and now. `is_own`: it is of this run."""
        resumed = saving.load(
            source,
            self.model,
            optimizer,
            config=self.config,
            parallel=self.parallel,
            comm=self.comm,
            fingerprint=self.found.fingerprint,
            seed_of=self._seed_of,
            hardware=self.hardware.described(),
            room=self.batches.room,
            is_own=is_own,
        )
        self.step = resumed.step
        with self.comm.together():
            try:
                self.batches.load(resumed.step, resumed.next_sample, resumed.documents, resumed.tensors)
            except ValueError as error:
                if is_own:
                    raise ConfigError(str(error)) from None
                self.batches.load(resumed.step, resumed.next_sample, {}, {})
                resumed.remarks.append(f"the data begin anew: {error}")
                resumed.health.pop("left_out", None)  # of the other data
        self.stepper.load_state_dict(resumed.stepper)
        self.health.load_state_dict(resumed.health)
        return resumed.remarks

    def _initialize(self) -> None:
        """Give the model its initial values."""
        initialize(self.model, seed=self.config.train.seed)
        if self.diloco is not None:
            self.diloco.restart()

    def _start_over(self) -> None:
        """Make the state at step 0 again, the same bits."""
        self._initialize()
        self.optimizer.state.clear()
        if (compression := compression_of(self.model)) is not None:
            compression.reset()
        self.step = 0
        self.batches.start_over()
        self.stepper.load_state_dict(self._first_stepper)
        self.health.load_state_dict({})
        seed_all(self.config.train.seed, self._seed_of)

    def _go_back(self, bad: Bad, error: BaseException) -> None:
        """Continue from the last good state, without the data of the bad steps. FloatingPointError without a good state."""
        self._check_lock()
        self.optimizer.zero_grad(set_to_none=True)
        passes_over = self.health.is_at_dead_end
        step = self.health.go_back(bad)
        with self.comm.together():
            if step is None:
                raise FloatingPointError(f"{error}; the run has no earlier state to go back to")
            self.observers.went_back(step)
        self._endurance.went_back(self.step, self._collected)
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
                with self.comm.together():
                    if is_rank0:
                        self.run.lock(self._say)
                self._report_into_folder()
                self._begin()  # again: another job may have trained in the folder meanwhile
            self._restore()
            if config.train.eval_only:
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

    def _restore(self) -> None:
        """Load the state from which the run continues, or set the initial values, and print the heading."""
        lasting = self._lasting
        copies, step = None, 0
        if not self.config.train.eval_only:
            age = on_rank0(self.comm, lambda: saving.age_of(self.start))
            copies, step = self._endurance.find(age), age.step
            self._is_in_copies_alone = copies is not None and (copies.step > step or lasting is None)
        if copies is not None:
            self.beginning = f"goes on from {copies}"
        is_recovery = lasting is not None and lasting.recovered is not None
        if not is_recovery:
            self._say(self._heading())
        lines = []
        if copies is not None:
            lines, self._start_step = self._take(copies, self.optimizer), step
        elif self.start is not None:
            lines = self.load(self.start)
            self._start_step = self.step
        elif not self._has_values:
            self._initialize()
        for line in [] if is_recovery else lines:
            self._say(line)
        # Its words alone: the copies would keep the memory of their files.
        self._source = str(copies or self.start or "its beginning")

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
        with self.comm.together():
            if rank0:
                aside = self.run.prepare(config)
                if aside is not None:
                    self._say(f"the earlier run is now {aside}")
                self.marks.begin()
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
        elif config.train.sample_bytes and self.tokenizer is not None:
            self._say("sample:\n" + self.sample())
        return stopped

    def _mark_end(self, reason: Reason) -> None:
        """The mark of completion. A run that only evaluates changes nothing in its folder, unless its supervisor waits for the mark."""
        if not self.config.train.eval_only or launch_number():
            if not self.config.train.eval_only:
                self.monitor.end(reason)
            with self.comm.together():
                self.marks.done(reason, self.step)

    def _train(self) -> bool:
        """The steps, and the last checkpoint; returns whether a rank was asked to stop."""
        config, device = self.config, self.hardware.device
        own = self._lasting.flops_per_s if self._lasting is not None else 0.0
        own = own or matmul_flops_per_s(device, getattr(torch, config.parallel.param_dtype))
        if self._lasting is not None:
            self._lasting.flops_per_s = own
        self.observers.begin(self.mesh, source=self._source, peak_flops_per_s=self._sum(own)[0])
        stopped = False
        start = None if self.start is None else (self.start, self._start_step)
        self.health.begin(self.step)
        self.health.sources = [
            StatesInMemory(self._endurance.find_good, lambda copies: self._take(copies, self.optimizer)),
            StatesOnDisk(self.comm, self.run.checkpoints, self.load, saved=self.health.reached, start=start),
        ]
        if start is None:
            self.health.sources.append(InitialState(self._start_over))
        if self._is_in_copies_alone and (self.step == config.train.steps or self._lasting is None):
            self._save_last()
        self.marks.alive("training", self.step)
        while self.step < config.train.steps and not stopped:
            self._endurance.before_step()
            self.observers.before_step(self.step + 1)
            try:
                metrics, stopped = self.train_step()
            except _GoBackError as error:
                self._go_back(error.bad, error)
                continue
            self.marks.alive("training", self.step)
            self.observers.after_step(self.step, metrics)
            if self.evaluator.is_due(self.step) and not stopped:
                self._evaluate_and_report()
            if self._endurance.after_step(self.step, self._collected):
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
        self.marks.alive("saving", self.step)
        ckpt.wait()
        self._endurance.end()

    def _report_passes(self) -> None:
        """The timeline of the last steps, if there is a pipeline."""
        report = self.passes.report()
        if report is None:
            return
        line, picture = report
        file = self.run.folder / "pipeline.svg"
        self._check_lock()
        with self.comm.together():
            if self.comm.rank == 0:
                file.write_text(picture)
        self._say(f"{line}\n{file} shows the last step beside the planned one")

    def _check_lock(self) -> None:
        with self.comm.together():
            self.run.check_lock()

    def _evaluate_and_report(self) -> None:
        with nullcontext() if self.diloco is None else self.diloco.swapped():
            found = self.evaluator.evaluate()
        self._check_lock()
        self.monitor.evaluated(found.metrics())
        self._say(f"step {self.step}  {found}")

    def _heading(self) -> str:
        sizes, hardware = self.model.config, self.hardware
        where = (
            "GPU"
            if hardware.device.type == "cuda"
            else f"CPU, {hardware.threads} thread{'s' * (hardware.threads > 1)} each"
        )
        model, held = self.config.model, sum(p.numel() for p in self.model.parameters())
        num_idle = self._lasting.num_idle if self._lasting is not None else 0
        messages = about_messages(
            self.config, self.parallel, num_nodes=self.comm.num_nodes, on_gpus=hardware.device.type == "cuda",
            threads=hardware.threads,
        )  # fmt: skip
        idle = f"; {num_idle} more without work, because they do not fit the layout" if num_idle else ""
        return (
            f"{self.comm.size} rank{'s' * (self.comm.size > 1)} on {self.comm.num_nodes} node{'s' * (self.comm.num_nodes > 1)}, "
            f"{where}{idle}\n"
            f"model {model.family} {model.size}: {num_parameters(sizes) / 1e6:.2f} M parameters, {held / 1e6:.2f} M on rank 0\n"
            f"data: {self.found}\n"
            + "".join(f"{line}\n" for line in (*messages, *self._about_engines))
            + f"run {self.run.folder} {self.beginning}"
        )

    @staticmethod
    def _with_threads(config: Config) -> ParallelConfig:
        """With slices the number of threads must not follow from the number of ranks, because kernels may divide sums by threads."""
        parallel = config.parallel
        return replace(parallel, threads=1) if config.train.slices and parallel.threads is None else parallel

    def _sum(self, *values: float) -> list[float]:
        """The sum of each value over the ranks, bit for bit the same on all ranks."""
        began = time.perf_counter()
        total: list[float] = self.comm.all_reduce(np.array(values, np.float64)).tolist()
        self._communication.more_s += time.perf_counter() - began
        return total
