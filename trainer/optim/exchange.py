"""Exchange of sharded matrices: each one comes whole to one rank, its owner, and a result returns to all ranks that hold a part.

Every rank computes the same owners and parts from names, shapes and placements alone. Parts are copied by their place in the
whole matrix, so what an owner receives does not depend on the layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.runtime.dtensor import regions_of_ranks

Region = tuple[slice, slice]
"""Rows and columns of a matrix."""


@dataclass(frozen=True)
class Sharding:
    """Who holds the parameters that exchange matrices."""

    parameters: Mapping[Tensor, Tensor]
    """This rank's shard -> parameter."""
    group: ProcessGroup | None
    """The ranks that together hold the parameters. None: this rank alone."""

    @property
    def ranks(self) -> list[int]:
        return [dist.get_rank()] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def rank(self) -> int:
        """Index of this rank in `ranks`."""
        return 0 if self.group is None else dist.get_rank(self.group)


BUCKET_VALUES = 2**25
"""Maximum number of values that an owner receives in one exchange, unless a single matrix has more."""


@dataclass(eq=False)
class Matrix:
    """A matrix, or one of a stack of matrices, and the ranks that hold and own it. Ranks are numbered as in the process group."""

    target: Tensor
    """This rank's shard of the parameter."""
    index: int | None
    """Index in this rank's shard of the stack, negative or too large if it holds other matrices. None: no stack."""
    shape: tuple[int, int]
    regions: Mapping[int, Region]
    """Rank -> what it holds. Ranks that hold nothing are missing."""
    owner: int = 0
    senders: Sequence[int] = field(default_factory=tuple)
    """For each distinct region, one of the ranks that hold it."""

    def part_of(self, shard: Tensor) -> Tensor:
        """Return this rank's part of the matrix, a view. shard: a tensor like `target`."""
        return shard if self.index is None else shard[self.index]


Piece = tuple[Matrix, Region]
"""A part of a matrix that one rank sends to another."""


def _size(region: Region) -> int:
    rows, columns = region
    return (rows.stop - rows.start) * (columns.stop - columns.start)


def matrices_of(target: Tensor, sharding: Sharding) -> list[Matrix]:
    """Return the matrices of a parameter, (rows, columns) or (matrices, rows, columns): itself, or those of the stack.

    target: this rank's shard."""
    parameter = sharding.parameters[target]
    regions = regions_of_ranks(parameter, sharding.ranks)
    *stack, rows, columns = parameter.shape
    if not stack:
        held = {i: region for i, region in enumerate(regions) if _size(region)}
        return [Matrix(target, None, (rows, columns), held)]
    found = []
    for index in range(stack[0]):
        held = {i: (r, c) for i, (own, r, c) in enumerate(regions) if own.start <= index < own.stop and _size((r, c))}
        found.append(Matrix(target, index - regions[sharding.rank][0].start, (rows, columns), held))
    return found


def assign_owners(matrices: Sequence[Matrix], cost: Callable[[Matrix], float], num_ranks: int) -> None:
    """Choose the owner of each matrix, and the ranks that send its parts.

    The most expensive matrices come first. Each goes to the rank that has the least to do, but to one that holds it whole, if any
    does. Ties go to the lower rank.

    Args:
        matrices: In an order that is the same on all ranks.
        cost: Of a matrix.
        num_ranks: Number of ranks in the group.
    """
    work = [0.0] * num_ranks
    for position, matrix in sorted(enumerate(matrices), key=lambda entry: -cost(entry[1])):
        whole = tuple(slice(0, size) for size in matrix.shape)
        holders = [rank for rank, region in matrix.regions.items() if region == whole]
        matrix.owner = min(holders or range(num_ranks), key=lambda rank: (work[rank], rank))
        work[matrix.owner] += cost(matrix)
        by_region: dict[tuple[int, ...], list[int]] = {}
        for rank, (rows, columns) in matrix.regions.items():
            by_region.setdefault((rows.start, rows.stop, columns.start, columns.stop), []).append(rank)
        matrix.senders = [
            matrix.owner if matrix.owner in ranks else ranks[position % len(ranks)] for ranks in by_region.values()
        ]


def buckets(matrices: Iterable[Matrix], num_values: int) -> list[list[Matrix]]:
    """Return the matrices in buckets, of which no owner has more than num_values values, or more than one matrix."""
    result: list[list[Matrix]] = []
    filled: dict[int, tuple[int, int]] = {}  # owner -> its last bucket, and its values in there
    for matrix in matrices:
        size = matrix.shape[0] * matrix.shape[1]
        index, values = filled.get(matrix.owner, (0, 0))
        if values and values + size > num_values:
            index, values = index + 1, 0
        filled[matrix.owner] = index, values + size
        result += [[] for _ in range(index + 1 - len(result))]
        result[index].append(matrix)
    return result


class AllToAll:
    """Pieces that the ranks send to each other, all in one collective."""

    def __init__(self, sent: Sequence[list[Piece]], received: Sequence[list[Piece]], group: ProcessGroup | None):
        """Plan the collective.

        Args:
            sent: Pieces for each rank of the group.
            received: Pieces from each rank of the group.
            group: None: nothing is exchanged.
        """
        self.sent, self.received, self.group = sent, received, group
        self._buffers: tuple[Tensor, ...] = ()
        self._work: dist.Work | None = None

    def start(self, values: Callable[[Piece], Tensor], like: Tensor) -> None:
        """Start to send.

        Args:
            values: Piece -> what it consists of.
            like: Has the dtype and the device of the pieces.
        """
        if self.group is None:
            return
        sent, received = (
            [sum(_size(region) for _, region in of) for of in side] for side in (self.sent, self.received)
        )
        outgoing, incoming = like.new_empty(sum(sent)), like.new_empty(sum(received))
        pieces = [piece for of_rank in self.sent for piece in of_rank]
        for piece, place in zip(pieces, outgoing.split([_size(region) for _, region in pieces]), strict=True):
            place.view(_shape(piece)).copy_(values(piece))
        self._work = dist.all_to_all_single(incoming, outgoing, received, sent, self.group, async_op=True)
        self._buffers = incoming, outgoing

    def finish(self) -> Iterator[tuple[Piece, Tensor]]:
        """Wait, and yield each piece that was received with its values, a view of the buffer."""
        if self._work is None:
            return
        self._work.wait()
        incoming, _ = self._buffers
        self._work, self._buffers = None, ()
        pieces = [piece for of_rank in self.received for piece in of_rank]
        for piece, values in zip(pieces, incoming.split([_size(region) for _, region in pieces]), strict=True):
            yield piece, values.view(_shape(piece))


def _shape(piece: Piece) -> tuple[int, int]:
    rows, columns = piece[1]
    return rows.stop - rows.start, columns.stop - columns.start


class Exchange:
    """The exchange of one bucket of matrices, there and back."""

    def __init__(self, bucket: Sequence[Matrix], sharding: Sharding):
        """Plan the exchange.

        Args:
            bucket: In an order that is the same on all ranks.
            sharding: Of the matrices.
        """
        self.rank = rank = sharding.rank
        num_ranks = len(sharding.ranks)
        group = sharding.group if num_ranks > 1 else None
        self.owned = [matrix for matrix in bucket if matrix.owner == rank]
        others = [other if other != rank else None for other in range(num_ranks)]
        self.there = AllToAll(
            [[(m, m.regions[rank]) for m in bucket if m.owner == r and rank in m.senders] for r in others],
            [[(m, m.regions[r]) for m in self.owned if r in m.senders] for r in others],
            group,
        )
        self.back = AllToAll(
            [[(m, m.regions[r]) for m in self.owned if r in m.regions] for r in others],
            [[(m, m.regions[rank]) for m in bucket if m.owner == r and rank in m.regions] for r in others],
            group,
        )

    def send(self, part_of: Callable[[Matrix], Tensor], like: Tensor) -> None:
        """Start to send this rank's parts to the owners.

        Args:
            part_of: Matrix -> this rank's part.
            like: Has the dtype and the device of the parts.
        """
        self.there.start(lambda piece: part_of(piece[0]), like)

    def receive(self, part_of: Callable[[Matrix], Tensor], like: Tensor) -> dict[Matrix, Tensor]:
        """Return the matrices that this rank owns, whole. See `send` for the arguments."""
        whole = {m: like.new_empty(m.shape) for m in self.owned}
        for m in self.owned:
            if self.rank in m.regions:
                whole[m][m.regions[self.rank]] = part_of(m)
        for (m, region), values in self.there.finish():
            whole[m][region] = values
        return whole

    def send_back(self, results: Mapping[Matrix, Tensor], like: Tensor) -> None:
        """Start to send the parts of results to the ranks that hold them.

        Args:
            results: Of the matrices that this rank owns.
            like: Has the dtype and the device of the results.
        """
        self.back.start(lambda piece: results[piece[0]][piece[1]], like)

    def receive_back(self, results: Mapping[Matrix, Tensor]) -> dict[Matrix, Tensor]:
        """Return matrix -> this rank's part of its result, for all matrices of which it holds a part. results: see send_back."""
        parts = {m: result[m.regions[self.rank]] for m, result in results.items() if self.rank in m.regions}
        return parts | {m: values for (m, _), values in self.back.finish()}
