"""The state of a run: what a checkpoint or a copy in node memory has, and what a rewind puts back."""

from collections.abc import Callable

from collectives import Communicator
from mpitrain.job.config import Config, ConfigError
from mpitrain.job.elastic.lease import Lease
from mpitrain.job.health import Health
from mpitrain.job.train.checkpoints import saving
from mpitrain.job.train.workload import Workload
from mpitrain.plans.draws import seed_all
from mpitrain.sharding.unit.unit import compression_of
from mpitrain.weights.initial_values import initialize
from mpitrain.weights.state import Collected, StoredState


class TrainingState:
    """The state after `step` steps. All methods are collective.

    Args:
        config, comm: of the run.
        work: whose model, optimizer and position in the data are parts of the state.
        health: the checks, whose state is another part.
        lease: the lease of the folder, for checkpoints; it gives None if the run is not elastic.
    """

    def __init__(
        self, config: Config, comm: Communicator, work: Workload, health: Health, lease: Callable[[], Lease | None]
    ) -> None:
        self._config, self._comm, self._work, self._health, self._lease = config, comm, work, health, lease
        self.step = 0
        """Steps done."""
        self._first_stepper = work.stepper.state_dict()

    def collected(self) -> Collected:
        """The state, for a checkpoint."""
        work = self._work
        return saving.collect(
            work.model,
            work.optimizer,
            config=self._config,
            parallel=work.parallel,
            comm=self._comm,
            step=self.step,
            next_sample=work.batches.train.next_sample(self.step),
            stepper=work.stepper.state_dict(),
            health=self._health.state_dict(),
            fingerprint=work.found.fingerprint,
            data=work.batches.state(self.step),
            lease=self._lease(),
            hardware=work.hardware.described(),
        )

    def load(self, source: StoredState, *, is_own: bool = True) -> list[str]:
        """Load the state of a source, for an evaluation the weights alone. Returns lines about differences between then and now.

        `is_own`: it is of this run.
        """
        work = self._work
        resumed = saving.load(
            source,
            work.model,
            None if self._config.train.eval_only else work.optimizer,
            config=self._config,
            parallel=work.parallel,
            comm=self._comm,
            fingerprint=work.found.fingerprint,
            seed_of=work.seed_of,
            hardware=work.hardware.described(),
            room=work.batches.room,
            is_own=is_own,
        )
        self.step = resumed.step
        self._go_on(resumed, is_own=is_own)
        work.stepper.load_state_dict(resumed.stepper)
        self._health.load_state_dict(resumed.health)
        return resumed.remarks

    def _go_on(self, resumed: saving.Resumed, *, is_own: bool) -> None:
        """Go on with the data at the place of a state, or begin them anew: all ranks do the same. Adds to the remarks."""
        batches, refused, remarks = self._work.batches, "", list[str]()
        with self._comm.together():
            try:
                batches.check_left_out(resumed.next_sample, resumed.health.get("left_out", ()))
                remarks = batches.load(resumed.step, resumed.next_sample, resumed.documents, resumed.tensors)
            except ValueError as error:
                if is_own:
                    raise ConfigError(str(error)) from None
                refused = str(error)
        # A rank has looked at the shards of its own lanes alone.
        reasons = [each for each in self._comm.all_gather_object(refused) if each]
        if not reasons:
            resumed.remarks.extend(remarks)
            return
        with self._comm.together():
            batches.load(resumed.step, resumed.next_sample, {}, {})
        resumed.remarks.append(f"the data begin anew: {reasons[0]}")
        resumed.health.pop("left_out", None)  # of the other data

    def initialize(self) -> None:
        """Give the model its initial values."""
        initialize(self._work.model, seed=self._config.train.seed)
        if self._work.diloco is not None:
            self._work.diloco.restart()

    def start_over(self) -> None:
        """Make the state at step 0 again, the same bits."""
        work = self._work
        self.initialize()
        work.optimizer.state.clear()
        if (compression := compression_of(work.model)) is not None:
            compression.reset()
        self.step = 0
        work.batches.start_over()
        work.stepper.load_state_dict(self._first_stepper)
        self._health.load_state_dict({})
        seed_all(self._config.train.seed, work.seed_of)
