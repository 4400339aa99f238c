"""Micro-batches from the rows of a rank: tokens, targets, segments of documents, and the numbers of sources."""

from collections.abc import Sequence

import numpy as np
import torch

from mpitrain.job.config import Config
from mpitrain.job.data.streaming.batches import DocumentBatches, HeldoutDocuments
from mpitrain.job.data.streaming.stream import TokenRows
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.batches.parts import BatchPart, rows_of
from mpitrain.models.loss import IGNORED
from mpitrain.models.segments import Segments


class MicroBatchMaker:
    """Makes micro-batches. `checks_tokens`: whether the rows may have tokens that the model does not have."""

    def __init__(self, config: Config, *, checks_tokens: bool) -> None:
        self._vocab, self._seed = config.model.resolve().vocab, config.train.seed
        self._mask_documents, self._checks_tokens = config.data.mask_documents, checks_tokens

    def make(
        self, rows: "np.ndarray | TokenRows", its: Sequence[BatchPart], source: object, index: int
    ) -> list[MicroBatch]:
        """`rows`: `rows_of` the parts, of batch `index` of `source`. ValueError for tokens that the model does not have."""
        sources = _sources_of(source, index, rows_of(its))
        made: list[MicroBatch] = []
        first = 0
        for part in its:
            if not part.counts:
                again = next(batch for batch in made if batch.slice == part.slice)
                made.append(again._replace(targets=torch.full_like(again.targets, IGNORED), num_padding=0))
                continue
            last = first + part.end - part.begin
            seed = None if part.slice is None else (self._seed, index, part.slice)
            batch = self._micro_batch(rows[first:last], sources[first:last])
            made.append(batch._replace(slice=part.slice, seed=seed))
            first = last
        return made

    def _micro_batch(self, rows: "np.ndarray | TokenRows", sources: np.ndarray) -> MicroBatch:
        array = rows if isinstance(rows, np.ndarray) else rows.tokens.astype(np.int64)
        if self._checks_tokens and array.size and not 0 <= array.min() <= array.max() < self._vocab:
            raise ValueError(
                f"model.vocab: the data have the tokens {array.min()} to {array.max()}, and the model has 0 to {self._vocab - 1}; "
                "take the vocabulary of the tokens' tokenizer"
            )
        tokens = torch.from_numpy(array)
        targets = tokens[:, 1:]
        if isinstance(rows, np.ndarray):
            return MicroBatch(tokens[:, :-1], targets, sources=sources)
        seen, after = rows.segments[:, :-1], rows.segments[:, 1:]
        if rows.is_whole:
            # Whole documents do not go on in the next one, and padding is none.
            targets = targets.where(torch.from_numpy((seen == after) & (after >= 0)), IGNORED)
        segments = Segments.of(seen) if self._mask_documents else None
        return MicroBatch(tokens[:, :-1], targets, segments, num_padding=int((seen < 0).sum()), sources=sources)


def source_names(batches: object) -> list[str]:
    """The names of the sources of batches: the numbers in `MicroBatch.sources` are their indices."""
    return batches.sources if isinstance(batches, DocumentBatches | HeldoutDocuments) else ["data"]


def _sources_of(batches: object, index: int, rows: Sequence[int]) -> np.ndarray:
    """The numbers of the sources of these rows of a batch."""
    if isinstance(batches, DocumentBatches | HeldoutDocuments) and len(batches.sources) > 1:
        return batches.sources_of(index, rows)
    return np.zeros(len(rows), np.int64)
