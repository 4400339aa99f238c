"""The batches of a run's data, of all ranks: from text and tokens, or from documents."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mpitrain.job.config import Config
from mpitrain.job.data import Batches, HeldoutBatches
from mpitrain.job.data.loading import Corpus, DocumentSources, shard_cache
from mpitrain.job.data.streaming.batches import DocumentBatches, HeldoutDocuments
from mpitrain.job.data.streaming.lanes import Recipe, open_lanes
from mpitrain.job.data.streaming.processes import Processes
from mpitrain.job.data.tokenizers import Bytes, Tokenizer
from mpitrain.job.data.tokens import TokenFiles


class Opened(NamedTuple):
    """The batches for training and for evaluations. `processes`: those that tokenize documents ahead of the training."""

    train: Batches | DocumentBatches
    heldout: HeldoutBatches | HeldoutDocuments
    processes: Processes | None = None


def open_batches(
    config: Config,
    found: Corpus | DocumentSources | TokenFiles,
    tokenizer: Tokenizer | None,
    *,
    reads: bool,
    say: Callable[[str], object],
) -> Opened:
    """The batches of the data. `reads`: whether this rank reads documents. `say`: gets a line about each damaged document.

    ValueError if the data are too few for a batch.
    """
    train, context = config.train, config.model.resolve().context
    if not isinstance(found, DocumentSources):
        return Opened(
            Batches(found.train, context=context, batch=train.batch, seed=train.seed),
            HeldoutBatches(found.heldout, context=context, batch=train.batch, num_batches=train.eval_batches),
        )
    share = config.data.heldout if found.heldout is None else 0.0
    weights = tuple(source.points for source in config.data.sources) or (((0, 1.0),),)
    recipe = Recipe(
        found.train, weights, found.lanes, train.batch, context, train.seed, config.data.packing,
        shard_cache(config.data, found.shards), tokenizer or Bytes(),
        share=(share, 1.0), max_damaged=config.data.max_bad_samples,
    )  # fmt: skip
    here = partial(open_lanes, say=say)
    processes = Processes(config.data.processes, say) if config.data.processes and reads else None
    of_train = DocumentBatches(recipe, here if processes is None else processes.open_lanes)
    of_heldout = replace(recipe, lanes=train.batch, share=(0.0, share))
    if found.heldout is not None:
        weights = tuple(source.points for source in config.data.heldout_sources)
        of_heldout = replace(of_heldout, sources=found.heldout, weights=weights, share=(0.0, 1.0))
    num_batches = train.eval_batches if found.heldout is not None or share else 0
    here = partial(here, fetches_ahead=False)
    heldout = HeldoutDocuments(of_heldout if num_batches else None, num_batches, here)
    return Opened(of_train, heldout, processes)
