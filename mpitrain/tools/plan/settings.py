"""A plan as settings of the trainer: a TOML file for `--config`."""

import json
from typing import Any

from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.layout import RankLayout
from mpitrain.tools.plan.learning_rate import LearningRate
from mpitrain.tools.plan.search import LayoutPlan
from mpitrain.tools.plan.transformer import in_settings


def sections(plan: LayoutPlan, lr: LearningRate | None = None) -> dict[str, dict[str, Any]]:
    """The settings of a run by this plan. `[model]` is there only if the trainer has the model.

    Raises:
        ValueError: the trainer cannot run the layout.
    """
    layout, job = plan.layout, plan.job
    if layout.context > 1 or layout.experts > 1:
        raise ValueError(f"the trainer lacks context and expert parallelism, which {layout} needs")
    made: dict[str, dict[str, Any]] = {}
    if (model := in_settings(job.model)) is not None:
        made["model"] = model
    made["parallel"] = parallel_section(layout, job.machine)
    if lr is not None:
        made["optim"] = {"lr": lr.lr} | ({} if lr.warmup_steps is None else {"warmup_steps": lr.warmup_steps})
    made["train"] = {"batch": layout.batch, "accumulate": layout.num_micro}
    return made


def parallel_section(layout: RankLayout, machine: Machine) -> dict[str, Any]:
    """The section `[parallel]` of a layout."""
    parallel: dict[str, Any] = {"stage": layout.zero, "copies": layout.copies, "tensor": layout.tensor}
    if layout.tensor > 1:
        parallel["sequence"] = layout.sequence
    if layout.pipeline > 1:
        parallel |= {"pipeline": layout.pipeline, "schedule": layout.schedule}
        if layout.schedule == "interleaved":
            parallel["stages_per_rank"] = layout.stages_per_rank
    if machine.shares_memory and layout.zero:
        parallel["storage"] = "resident" if layout.resident else "private"
    if machine.element_bytes == 2:
        parallel["param_dtype"] = "bfloat16"
    parallel["checkpoint_activations"] = layout.recompute
    return parallel


def to_toml(plan: LayoutPlan, lr: LearningRate | None = None) -> str:
    """The settings as TOML, with a comment that says what they are for."""
    job = plan.job
    head = [
        f"# {job.model.name} on {job.ranks} ranks of {job.machine.name}: {plan.step_s:.4g} s a step, {plan.nbytes / 1e9:.3g} GB a rank"
    ]
    if in_settings(job.model) is None:
        head.append("# The trainer lacks this model, so there is no section [model]: add one before use.")
    lines = ["\n".join(head)]
    for name, values in sections(plan, lr).items():
        lines.append("\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]))
    return "\n\n".join(lines) + "\n"
