"""The ranks of a training: exchange values, fail together, and notice communication in ``evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from dynaquant.engine.reduction import Numbers
from dynaquant.errors import DynaquantError
from dynaquant.ranks.board import Board

P = ParamSpec("P")
T = TypeVar("T")


EVALUATE = "evaluate"
"""What a rank does while it evaluates."""
_FAILED = " failed"
_MOST_LISTED = 8
"""Ranks that a message lists."""
SAME_IN_EVALUATE = (
    "Operations of torch.distributed in evaluate, and forward passes of a sharded model, wait for all ranks: do the "
    "same there on all ranks"
)
"""What to do about a rank that has waited in vain in evaluate."""


class _OtherRankFailedError(Exception):
    """Another rank has failed in ``Group.run_reducing``."""


class Group:
    """All processes of the training, connected over the CPU (Gloo). A single process is a group of one.

    Every rank creates it at the same time, and closes it when it is done. All methods except ``watch_communication``
    and ``close`` are collective: every rank calls them, in the same order. They raise DynaquantError if another rank
    has stopped, or does not answer within the timeout of the training's process group
    (``init_process_group(timeout=…)``).

    alone: a group of this process only, whatever other processes there are. Nothing is collective then.
    """

    _created = 0  # groups of several ranks, in this process; all ranks create as many

    def __init__(self, alone: bool = False) -> None:
        self._group: dist.ProcessGroup | None = None
        self._board: Board | None = None
        self._saw_communication = False
        self._untold: Exception | None = None
        self.rank, self.size = 0, 1
        self.replicas: Sequence[Sequence[int]] = [[0]]
        """The ranks of each replica. Those of one replica hold one copy of the model between them."""
        if not alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.replicas = [[rank] for rank in range(self.size)]
            with self._others_must_answer():
                # The default group may use NCCL, which moves only CUDA tensors. By itself, a new group waits as long as
                # PyTorch's default, whatever the timeout of the training is.
                self._group = dist.new_group(backend="gloo", timeout=_timeout())
            Group._created += 1
            self._board = Board(Group._created, self.rank, self.size)
        # Unlike ``weakref.finalize``, this does nothing in forks of this process, which do not have the threads.
        self._end = Finalize(self, _destroy, (self._group,), exitpriority=0)

    def close(self) -> None:
        """Disconnect, and end the threads of the connection. The group must not be used after it. May be called twice.

        Such a thread needs the GIL to free the tensors of its last operation. If it still waits for the GIL when the
        interpreter ends, the process aborts (https://github.com/pytorch/pytorch/issues/190489). So this is also called
        when the group is garbage-collected, or the process ends.
        """
        self._group = self._board = None
        self._end()

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Every rank gets the same list. Values are pickled."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with self._others_must_answer():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def from_rank_0(self, value: T) -> T:
        """Return rank 0's value on every rank. It is pickled."""
        if self._group is None:
            return value
        values = [value]
        with self._others_must_answer():
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def gather_to_rank_0(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, in rank order, and nothing on the others. Values are pickled."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._others_must_answer():
            dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def on_rank_0(self, action: Callable[[], T]) -> T | None:
        """Run an action on rank 0 and return its result there, None on the other ranks. If it fails, all ranks fail."""
        return self.run_on_all_ranks(lambda: action() if self.rank == 0 else None)

    def made_by_rank_0(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 and return its result on every rank. It is pickled. If it fails, all ranks fail."""
        return self.from_rank_0(self.on_rank_0(action))  # type: ignore[return-value]

    def reduce(self, numbers: Numbers) -> Numbers:
        """Return the numbers of all ranks together. Every rank gives and gets as many."""
        if self._group is None:
            return numbers
        self._continue(failed=False)
        found = []
        for values, operation in ((numbers.sums, dist.ReduceOp.SUM), (numbers.highest, dist.ReduceOp.MAX)):
            both = torch.from_numpy(values.copy())
            if len(values):
                with self._others_must_answer():
                    dist.all_reduce(both, operation, group=self._group)
            found.append(both.numpy())
        return Numbers(*found)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Let the other ranks know what this rank does, in case they wait for it in vain. Not collective."""
        if (board := self._board) is None:
            yield
            return
        before = board.own
        board.write(what)
        try:
            yield
        except BaseException as error:
            board.write(before, f"{_failed_in(error, what)}{_FAILED}")
            raise
        board.write(before)

    @contextmanager
    def _others_must_answer(self) -> Iterator[None]:
        """Explain an error of Gloo, which names no rank and says nothing about the run."""
        try:
            yield
        except ValueError as error:  # PyTorch forgets its groups
            if dist.is_initialized():
                raise
            raise DynaquantError("the process group is destroyed; close the Checkpointer before that") from error
        except RuntimeError as error:
            first = "" if self._untold is None else f"rank {self.rank} failed: {_in_words(self._untold)}; then "
            raise DynaquantError(
                f"{first}rank {self.rank} waited{self._for_whom()}. The run keeps its last commit: start the training "
                "again, and restore() continues from there"
            ) from (self._untold or error)

    def _for_whom(self) -> str:
        """Return which ranks have not answered, as far as they have said what they do, and what to do about it."""
        late = "when the timeout of the process group (init_process_group(timeout=…)) ended"
        other = "another rank" if self.size > 2 else f"rank {1 - self.rank}"
        if self._board is None:
            return f" for {other} to make its Checkpointer {late}. Make it on all ranks, at the same time"
        own, others = self._board.own, self._board.read()
        where = f" in {own}" if own else ""

        def which(*doing: str) -> str:
            return _in_list([rank for rank, what in others.items() if what in doing])

        if self._untold is not None and has_timed_out(str(self._untold)):
            return f"{where}. {SAME_IN_EVALUATE}"
        if ranks := which(EVALUATE):
            return f"{where} for {ranks}, still in evaluate {late}. {SAME_IN_EVALUATE}, or allow more time"
        if ranks := which(EVALUATE + _FAILED):
            return f"{where} for {ranks}, where evaluate failed: look at the output there. {SAME_IN_EVALUATE}"
        if own and (ranks := which("")):
            return f"{where} for {ranks}, not in {own} {late}. Call {own} on all ranks, at the same steps"
        ranks = which(own + _FAILED) or other
        return (
            f"{where} for {ranks}, which has stopped, or has not answered within the timeout of the process group; "
            "look at the output of all ranks for the first error"
        )

    def will_tell(self, error: Exception | None) -> Exception | None:
        """Remember an error of this rank until the other ranks are told of it, in case they cannot be reached."""
        self._untold = error
        return error

    def run_reducing(self, action: Callable[[], T]) -> T:
        """Run an action in which all ranks reduce, and return this rank's result. If it fails on one, it fails on all.

        Like ``run_on_all_ranks``, but no rank waits in ``reduce`` for one that has failed.
        """
        result, error = None, None
        try:
            result = action()
            self._continue(failed=False)
        except _OtherRankFailedError:
            pass  # ``run_on_all_ranks`` raises for its error
        except Exception as raised:
            error = self.will_tell(raised)
            with suppress(_OtherRankFailedError):
                self._continue(failed=True)

        def outcome() -> T | None:
            if error is not None:
                raise error
            return result

        return self.run_on_all_ranks(outcome)  # type: ignore[return-value]

    def _continue(self, failed: bool) -> None:
        """Tell the other ranks whether this one has failed, before each reduction and after the last one."""
        if self._group is None:
            return
        flag = torch.tensor([float(failed)])
        with self._others_must_answer():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        if flag.item() and not failed:
            raise _OtherRankFailedError

    def run_on_all_ranks(self, action: Callable[[], T]) -> T:
        """Run an action on every rank and return this rank's result. If it fails on one rank, it fails on all.

        A rank where the action fails raises the action's own exception; the other ranks raise DynaquantError. So no
        rank continues and waits for ranks that have stopped.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = self.will_tell(raised)
        texts = self.all_gather(None if error is None else _in_words(error))
        self._untold = None
        if error is not None:
            raise error
        failed = [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise DynaquantError("; ".join(failed))
        return result  # type: ignore[return-value]

    def watch_communication(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap a function so that ``saw_communication`` reports whether it communicated between replicas."""
        if self._group is None:
            return function
        own = set(self.replicas[self.replica])

        def watched(*args: P.args, **kwargs: P.kwargs) -> T:
            before = _operations(own)
            try:
                with self.doing(EVALUATE):
                    return function(*args, **kwargs)
            finally:
                self._saw_communication |= before is None or _operations(own) != before

        return watched

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return next(number for number, ranks in enumerate(self.replicas) if self.rank in ranks)

    def of_replicas(self, by_rank: Sequence[T]) -> list[T]:
        """Return the value of each replica's first rank."""
        return [by_rank[ranks[0]] for ranks in self.replicas]

    def saw_communication(self) -> bool:
        """Whether a watched function has ever communicated between replicas, or may have. Collective."""
        self._saw_communication = any(self.all_gather(self._saw_communication))
        return self._saw_communication


def has_timed_out(text: str) -> bool:
    """Whether an error is that of a rank which other ranks have not answered, by its text."""
    return "timed out" in text.lower()


def _failed_in(error: BaseException, what: str) -> str:
    """Return in what an error was raised first. what: that which it ends now."""
    while error.__cause__ is not None:
        error = error.__cause__
    first: str = vars(error).setdefault("_dynaquant_failed_in", what)
    return first


def _in_list(numbers: Sequence[int]) -> str:
    """Return ranks in words; an empty text for none."""
    if not numbers:
        return ""
    shown = [str(number) for number in numbers[:_MOST_LISTED]]
    more = f" and {len(numbers) - len(shown)} others" if len(numbers) > len(shown) else ""
    return f"rank {shown[0]}" if len(numbers) == 1 else f"ranks {', '.join(shown)}{more}"


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.is_initialized():
        with suppress(ValueError):  # the training has destroyed all groups, and begun anew
            dist.destroy_process_group(group)
    # Once nothing refers to the group, PyTorch joins its threads.


def _in_words(error: Exception) -> str:
    """Return the type, the message and the notes of an error, for the other ranks."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _timeout() -> timedelta | None:
    """Return how long the training's process group waits for a rank; None if it does not say."""
    group: Any = dist.group.WORLD
    try:  # PyTorch has no public function for this
        longest: timedelta = max(group._get_backend(device).options._timeout for device in group._device_types)
        return longest
    except (AttributeError, RuntimeError, ValueError):
        return None


def _operations(inside: Collection[int]) -> dict[str, list[int]] | None:
    """Count the operations that the backends of each process group have begun, by group name.

    inside: ranks that may communicate with each other; groups of only such ranks are not counted.

    Returns None if a backend does not count, for example MPI. Backends count operations from Python, C++ and compiled
    code, in any thread. NCCL does not count ``send`` and ``recv``. PyTorch has no public function for this.
    """
    try:
        return {
            name: [_begun(group._get_backend(device)) for device in group._device_types]
            for group, name in dist.distributed_c10d._world.pg_names.items()
            if group.size() > 1 and not set(dist.get_process_group_ranks(group)) <= set(inside)
        }
    except (AttributeError, RuntimeError):
        return None


def _begun(backend: Any) -> int:
    return int(backend._get_sequence_number_for_group())
