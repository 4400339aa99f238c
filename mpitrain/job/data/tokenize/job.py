"""The tokens of all documents, by all ranks of a job. Each rank takes pieces that no other one has, and writes a file for each.

A rank begins with its share of the pieces that are missing, which are neighbours, and then takes what the others have not begun. So
ranks of unequal speed end at the same time, up to a piece. They exchange no messages: the folder says which pieces are taken.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from collectives import Communicator
from collectives.diagnosis.hangs.deadline import Deadline
from mpitrain.job.config import ConfigError, DataConfig
from mpitrain.job.data.documents import VERSION, Cut, DamagedSampleError, checked_text, has_kind_as_before
from mpitrain.job.data.loading import say_what_stays, shard_cache
from mpitrain.job.data.open_shards import first_texts
from mpitrain.job.data.streaming.feed import Tolerance, tell
from mpitrain.job.data.tokenize.documents import DocumentPiece, Origin, cuts_of, find, pieces_of
from mpitrain.job.data.tokenize.output import Numbers, OutputFolder, summed
from mpitrain.job.data.tokenize.progress import ShownProgress
from mpitrain.job.data.tokenizers import JsonTokenizer, load_tokenizer
from mpitrain.job.data.tokens import MegatronWriter, smallest_dtype
from mpitrain.placement.rank0 import on_rank0

_LOOK_EVERY_S = 0.5
_LOOK_SHARE = 50  # a look at a slow file system, with thousands of files, takes at most 2 % of the time


class Result(NamedTuple):
    """What a job has made. `whole`: with what earlier jobs have made; `own`: by this job, which took so many seconds."""

    whole: Numbers
    own: Numbers
    seconds: float
    num_files: int
    num_tokens: int
    dtype: str


def tokenize(config: DataConfig, folder: Path, comm: Communicator) -> Result:
    """Write the tokens of all documents into files of the folder, except for those that an earlier job has written. Collective.

    The files are the same at any number of ranks.

    Raises:
        ConfigError: settings that do not fit, or a folder with something else.
        FolderInUseError: another job writes to the folder.
        ValueError: the documents cannot be read, or more of them are damaged than `config.max_bad_samples`.
        OSError: a shard cannot be fetched, or a file cannot be written.
    """
    origins = on_rank0(comm, lambda: find(config))
    with comm.together():
        tokenizer = load_tokenizer(config, vocab=None)
        if not isinstance(tokenizer, JsonTokenizer):
            raise ConfigError(
                "data.tokenizer: expected the path of a tokenizer.json; `python -m mpitrain tokenizer train` makes one"
            )
    job = _Job(config, origins, tokenizer, OutputFolder(folder, smallest_dtype(tokenizer.num_tokens).itemsize), comm)
    lock = None
    with comm.together():
        if comm.rank == 0:
            lock = job.output.lock()
    try:
        job.is_earlier = on_rank0(comm, lambda: job.output.begin(job.settings(), job.marks())) < VERSION
        result = job.run()
    finally:
        if lock is not None:
            lock.release()
        say_what_stays(config, [origin.shards for origin in origins], speaks=comm.node.rank == 0)
    comm.barrier()  # the folder is free when any rank returns
    return result


class _Job:
    """A job on this rank."""

    def __init__(
        self,
        config: DataConfig,
        origins: Sequence[Origin],
        tokenizer: JsonTokenizer,
        output: OutputFolder,
        comm: Communicator,
    ) -> None:
        self.output = output
        self._origins, self._tokenizer, self._comm = origins, tokenizer, comm
        self._pieces = pieces_of(origins)
        self._dtype = smallest_dtype(tokenizer.num_tokens)
        cache = shard_cache(config, [origin.shards for origin in origins])
        self._opened = [origin.opened(cache) for origin in origins]
        self._tolerance = Tolerance(config.max_bad_samples, tell)
        self._num_damaged = 0  # by this rank
        self.is_earlier = False
        """Whether an earlier version has begun with the folder: what is missing must be as it would have read it."""
        self._piece: DocumentPiece | None = None  # on which it works
        self._next_look = 0.0

    def settings(self) -> dict[str, Any]:
        """What the files depend on."""
        return {
            "tokenizer": self._tokenizer.name,
            "separator": self._tokenizer.separator,
            "dtype": str(self._dtype),
            "sources": [[each.name, each.field, len(each.shards.names), each.fingerprint()] for each in self._origins],
            "pieces": hashlib.blake2b(msgspec.json.encode(self._pieces), digest_size=8).hexdigest(),
        }

    def marks(self) -> list[str]:
        """What the names of the shards hide, by source."""
        return [origin.mark() for origin in self._origins]

    def run(self) -> Result:
        """Write all files that are missing. Collective."""
        comm, output = self._comm, self.output
        with comm.together():
            output.check_shared()
        started = time.monotonic()
        missing = on_rank0(
            comm, lambda: [index for index, piece in enumerate(self._pieces) if output.numbers(piece) is None]
        )
        wanted = [self._pieces[index] for index in missing]
        with comm.together():
            if self.is_earlier and wanted:
                self._check_kinds()
        lines = (
            self._tokenizer.use_fast_engine(comm, lambda: first_texts(next(self._cuts(wanted[0])))) if wanted else []
        )
        shown = self._show(wanted, lines) if comm.rank == 0 else None
        own, error = Numbers(), None
        try:
            own = self._work(wanted, lambda: self._look(shown))
        except Exception as raised:
            output.mark_failed()
            error = raised
        try:
            self._wait_for_others(shown)
        except OSError as raised:
            error = error or raised
        finally:
            if shown is not None:
                shown.close()
        with comm.together():
            if error is not None:
                raise error
        seconds = time.monotonic() - started
        of_all = summed(comm.all_gather_object(own))
        return on_rank0(comm, lambda: self._result(of_all, seconds))

    def _wait_for_others(self, shown: ShownProgress | None) -> None:
        """Wait for all ranks, without load on their cores. They may have hours of work: the deadline counts from their last sign."""
        ended = self._comm.barrier(async_op=True)
        signs, until = None, math.inf
        while not ended.done() and time.monotonic() < until:
            time.sleep(0.05)
            if self._look(shown) is not None and (now := self.output.signs()) != signs:
                signs, until = now, time.monotonic() + (Deadline.seconds or math.inf)
        ended.wait()  # has the deadline, and the report
        self._next_look = 0.0
        self._look(shown)

    def _work(self, wanted: Sequence[DocumentPiece], look: Callable[[], bool | None]) -> Numbers:
        """Write pieces until all are taken, or another rank has an error."""
        first = len(wanted) * self._comm.rank // self._comm.size
        done = []
        for piece in (*wanted[first:], *wanted[:first]):
            if self.output.claim(piece):
                self._piece = piece
                numbers = self._write(piece, look)
                if numbers is None:
                    break
                done.append(numbers)
        self._piece = None
        return summed(done)

    def _write(self, piece: DocumentPiece, look: Callable[[], bool | None]) -> Numbers | None:
        """Write the files of a piece; None if another rank has an error."""
        text_bytes, num_damaged = 0, 0
        file = MegatronWriter(self.output.path_of(piece), self._dtype)
        try:
            for cut in self._cuts(piece):
                if self.is_earlier and not cut.is_as_before():
                    raise self._otherwise(f"{cut.where(0)} and those beside it" if len(cut) else piece.name)
                for index in range(len(cut)):
                    try:
                        text = checked_text(cut, index)
                    except DamagedSampleError as error:
                        num_damaged += 1
                        self._num_damaged += 1
                        self._tolerance.say(str(error))
                        self._tolerance.check(self._num_damaged, str(error))
                        continue
                    file.add(self._tokenizer.document(text))
                    text_bytes += len(text)
                    if look():
                        return None
            file.commit()
        finally:
            file.discard()
        numbers = Numbers(
            documents=file.num_documents, tokens=file.num_tokens, text_bytes=text_bytes, damaged=num_damaged
        )
        self.output.complete(piece, numbers)
        return numbers

    def _check_kinds(self) -> None:
        """ConfigError if an earlier version took shards for others than this one."""
        for origin in self._origins:
            for name, path in zip(origin.shards.names, origin.shards.paths, strict=True):
                if origin.kind is None and not has_kind_as_before(path, name):
                    raise self._otherwise(name)

    def _otherwise(self, what: str) -> ConfigError:
        return ConfigError(
            f"tokenize: {self.output.folder} has tokens by an earlier version, which read {what} otherwise; choose another --out"
        )

    def _cuts(self, piece: DocumentPiece) -> Iterator[Cut]:
        return cuts_of(piece, self._opened[piece.origin])

    def _show(self, wanted: Sequence[DocumentPiece], lines: Sequence[str]) -> ShownProgress:
        total = sum(piece.num_bytes for piece in self._pieces)
        missing = sum(piece.num_bytes for piece in wanted)
        num_shards = sum(len(each.shards.names) for each in self._origins)
        shown = ShownProgress("tokenize", total, total - missing)
        shown.say(
            f"tokenize: {num_shards} shard{'s' * (num_shards > 1)}, {total / 1e6:,.1f} MB, in {len(self._pieces)} pieces; "
            f"{self._tokenizer.name}, {self._tokenizer.num_tokens} tokens"
        )
        for line in lines:
            shown.say(line)
        if len(wanted) < len(self._pieces):
            shown.say(f"tokenize: {len(self._pieces) - len(wanted)} pieces are complete; {len(wanted)} are missing")
        return shown

    def _look(self, shown: ShownProgress | None) -> bool | None:
        """From time to time: show the progress of all ranks, and be seen. Returns whether a rank has an error; None: not yet again."""
        if (began := time.monotonic()) < self._next_look:
            return None
        if self._piece is not None:
            self.output.is_alive(self._piece)
        if shown is not None:
            names = self.output.complete_names()
            shown.update(sum(piece.num_bytes for piece in self._pieces if piece.name in names))
        has_failed = self.output.has_failed()
        ended = time.monotonic()
        self._next_look = ended + max(_LOOK_EVERY_S, _LOOK_SHARE * (ended - began))
        return has_failed

    def _result(self, own: Numbers, seconds: float) -> Result:
        """ValueError if too many documents are damaged, or there is none. On rank 0."""
        found = [self.output.numbers(piece) for piece in self._pieces]
        if lost := [piece.name for piece, numbers in zip(self._pieces, found, strict=True) if numbers is None]:
            raise OSError(f"tokenize: {self.output.folder}/{lost[0]} is gone or damaged; start the same job again")
        self.output.end()
        whole = summed(each for each in found if each is not None)
        self._tolerance.check(whole.damaged)
        if not whole.documents:
            raise ValueError("data: the shards have no documents; expected at least one")
        num_files = sum(each is not None and each.tokens > 0 for each in found)
        return Result(whole, own, seconds, num_files, self._tokenizer.num_tokens, str(self._dtype))
