"""What to try: other settings of the same training, each with the gain that the planner's cost model expects. No torch, no MPI.

Each piece of advice fits the memory by the planner's estimate, and all but one keep the global batch, so the mathematics. The machine
of the model is a file of `plan --measure`, or one that is fitted to the figures of the profile itself: its rates are those at which
this step computed and communicated.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from collectives.shared.tables import plural
from mpitrain.job.config import Config, ConfigError, check_ranks, parse
from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.footprint import footprint
from mpitrain.tools.plan.layout import MPITRAIN, RankLayout
from mpitrain.tools.plan.price import price
from mpitrain.tools.plan.search import LayoutPlan, PlanJob, search
from mpitrain.tools.plan.settings import parallel_section
from mpitrain.tools.plan.transformer import Transformer, of_sizes
from mpitrain.tools.profile.fitting import Figures, fitted, layout_of

LEAST_GAIN = 0.03
"""A smaller gain is less than the model's error."""
_MOST = 6  # pieces of advice
_LARGE_ERROR = 0.25  # of the model


class Advice(NamedTuple):
    """Other values of settings, by full name."""

    settings: Mapping[str, Any]
    gain: float
    """The share of the step that they save, as the model expects."""
    why: str = ""

    @property
    def flags(self) -> str:
        """For the command line."""
        return " ".join(f"--{name} {str(value).lower()}" for name, value in self.settings.items())


class Advised(NamedTuple):
    """The advice, the largest gain first, and how good the model is."""

    machine: str
    is_fitted: bool
    """The machine has the rates of this profile."""
    predicted_s: float
    """Of a step with the present settings."""
    measured_s: float
    others_s: float
    """Of it, what the model does not have."""
    advice: list[Advice]
    larger_batch: Advice | None
    """Its gain is the share of the time for a token."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1

    def lines(self) -> Iterable[str]:
        """In words."""
        of, ms = f"the machine {self.machine}", f"{self.predicted_s * 1e3:,.1f} ms"
        if self.is_fitted:
            of = "a machine that is fitted to this profile"
        measured = f"{self.measured_s * 1e3:,.1f} ms"
        yield f"The cost model expects {ms} for this step on {of}; measured: {measured}, an error of {self.error:+.0%}."
        yield f"The model lacks {self.others_s * 1e3:,.1f} ms of the step: waits for late ranks, data, checks and other own work."
        if abs(self.error) > _LARGE_ERROR:
            yield "With this error the gains below show only what to try first."
        if self.is_fitted:
            yield "A measured machine gives better gains: mpirun ... plan --measure FILE.toml, then --machine FILE.toml."
        for each in self.advice:
            yield f"{each.gain:.0%} less: {each.flags}" + f" ({each.why})" * bool(each.why)
        if not self.advice:
            yield f"No other layout that fits the memory is expected to gain {LEAST_GAIN:.0%} or more."
        if (larger := self.larger_batch) is not None:
            yield f"{larger.gain:.0%} less per token: {larger.flags} ({larger.why})"


def advised(config: Config, num_ranks: int, figures: Figures, machine: Machine | None = None) -> Advised:
    """What to try. ValueError for settings that have no layout."""
    model = of_sizes(
        f"{config.model.family} {config.model.size}", config.model.resolve(), (config.model.family, config.model.size)
    )
    used = machine or fitted(config, model, num_ranks, figures)
    layout = layout_of(config, num_ranks, used)
    saved_s, now_s = _saved_by_keeping(model, used, layout), _step_s(config, model, used, layout)
    found = [*_other_layouts(model, used, layout, now_s)]
    if saved_s and config.parallel.reshard_after_forward and _fits(model, used, layout._replace(zero=2)):
        settings = {"parallel.reshard_after_forward": False}
        found.append(Advice(settings, saved_s / now_s, "blocks keep their parameters for the backward"))
    if (share := figures.data_s / figures.step_s) >= LEAST_GAIN:
        more = {"data.processes": config.data.processes + 1}
        found.append(Advice(more, share, "at most, for documents: processes that tokenize while the ranks compute"))
    found = [each for each in found if each.gain >= LEAST_GAIN and _is_possible(config, num_ranks, each)]
    found.sort(key=lambda each: -each.gain)
    larger = [each for each in _larger_batches(config, model, used, layout) if _is_possible(config, num_ranks, each)]
    larger_batch = max(larger, key=lambda each: each.gain, default=None)
    return Advised(used.name, machine is None, now_s, figures.step_s, figures.others_s, found[:_MOST], larger_batch)


def _is_possible(config: Config, num_ranks: int, advice: Advice) -> bool:
    try:
        check_ranks(parse(advice.flags.split(), config), num_ranks)
    except ConfigError:
        return False
    return True


def _other_layouts(model: Transformer, machine: Machine, layout: RankLayout, now_s: float) -> Iterable[Advice]:
    """The best change of each one setting, and the best of all if it is better by more."""
    job = PlanJob(model, machine, MPITRAIN, layout.ranks, layout.batch, (("context", 1), ("experts", 1)))
    try:
        fitting = search(job).fitting
    except ValueError:  # the batch is not a multiple of any number of data ranks: an elastic run
        return
    present = _settings(layout, machine)
    best: dict[str, Advice] = {}
    for plan in fitting:
        changed = _changes(present, plan.layout, machine)
        causes = changed.keys() - _following(changed)
        if len(causes) == 1 and (cause := causes.pop()) not in best:  # the fastest comes first
            best[cause] = Advice(changed, 1 - plan.step_s / now_s, _why(plan, layout))
    yield from best.values()
    if fitting:
        changed = _changes(present, fitting[0].layout, machine)
        gain, alone = 1 - fitting[0].step_s / now_s, max((each.gain for each in best.values()), default=0.0)
        if len(changed.keys() - _following(changed)) > 1 and gain > alone + 0.01:
            yield Advice(changed, gain, "together, the planner's best layout")


def _changes(present: Mapping[str, Any], layout: RankLayout, machine: Machine) -> dict[str, Any]:
    """The settings that another layout needs."""
    wanted = _settings(layout, machine)
    if "parallel.stages_per_rank" in present:
        wanted.setdefault("parallel.stages_per_rank", None)
    changed = {name: value for name, value in wanted.items() if present.get(name) != value}
    if layout.pipeline == 1:
        unused = {"parallel.schedule", "parallel.stages_per_rank"}
        changed = {name: value for name, value in changed.items() if name not in unused}
    return changed


def _settings(layout: RankLayout, machine: Machine) -> dict[str, Any]:
    section = parallel_section(layout, machine)
    named = {f"parallel.{name}": value for name, value in section.items()}
    named.setdefault("parallel.schedule", "1f1b")
    named.setdefault("parallel.pipeline", 1)
    if layout.data == 1:
        named.pop("parallel.stage")
        named.pop("parallel.storage", None)
    return named | {"train.accumulate": layout.num_micro}


_FOLLOW = {
    "parallel.pipeline": {"parallel.schedule", "parallel.stages_per_rank", "train.accumulate", "parallel.stage", "parallel.storage"},
    "parallel.schedule": {"parallel.stages_per_rank"},
    "parallel.tensor": {"parallel.sequence", "parallel.stage", "parallel.storage"},
    "parallel.stage": {"parallel.storage"},
}  # fmt: skip
"""Settings that change together with others."""


def _following(changed: Iterable[str]) -> set[str]:
    return set().union(*(_FOLLOW.get(name, set()) for name in changed))


def _why(plan: LayoutPlan, before: RankLayout) -> str:
    after = plan.layout
    if after.micro != before.micro and after.data == before.data:
        return f"micro-batches of {after.micro} sequences in place of {before.micro}"
    if after.data != before.data:
        return f"{plural(after.data, 'data-parallel rank')} in place of {before.data}"
    return ""


def _larger_batches(config: Config, model: Transformer, machine: Machine, layout: RankLayout) -> Iterable[Advice]:
    """Twice the batch, in larger micro-batches or in more of them, where a token costs less then."""
    now_s = _step_s(config, model, machine, layout)
    twice = layout._replace(batch=2 * layout.batch)
    for tried in (twice._replace(micro=2 * layout.micro), twice):
        kept = tried if config.parallel.reshard_after_forward or tried.zero != 3 else tried._replace(zero=2)
        gain = 1 - _step_s(config, model, machine, tried) / (2 * now_s)
        if gain >= LEAST_GAIN and _fits(model, machine, kept):
            settings = {"train.batch": tried.batch}
            if tried.num_micro != config.train.accumulate:
                settings["train.accumulate"] = tried.num_micro
            yield Advice(settings, gain, "other mathematics: the batch is larger")


def _step_s(config: Config, model: Transformer, machine: Machine, layout: RankLayout) -> float:
    """The price of a step. The layouts of the planner gather again in the backward."""
    saved_s = 0.0 if config.parallel.reshard_after_forward else _saved_by_keeping(model, machine, layout)
    return price(model, machine, MPITRAIN, layout).step_s - saved_s


def _saved_by_keeping(model: Transformer, machine: Machine, layout: RankLayout) -> float:
    """Seconds that full parameters save which stay between forward and backward: they are gathered as often as in stage 2."""
    if layout.zero != 3 or layout.resident:
        return 0.0
    twice, once = (price(model, machine, MPITRAIN, layout._replace(zero=stage)).seconds["gathers"] for stage in (3, 2))
    return max(twice - once, 0.0)


def _fits(model: Transformer, machine: Machine, layout: RankLayout) -> bool:
    """Whether the memory has room. Blocks that keep their parameters need as much as in stage 2."""
    job = PlanJob(model, machine, MPITRAIN, layout.ranks, layout.batch)
    return LayoutPlan(job, layout, footprint(model, machine, MPITRAIN, layout)).lacks_bytes <= 0
