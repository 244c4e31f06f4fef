"""Mini-batches of the epoch-local SFT phase on teacher suffixes."""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def epoch_sft_minibatches(
    snapshot: Sequence[tuple[Hashable, T]], mini_batch_size: int, epoch_passes: int
) -> Iterator[tuple[int, list[T]]]:
    """Yields (pass, mini-batch) from a frozen snapshot of (tree, node) pairs.

    Every batch is full and has nodes of distinct trees. Within a pass each node is used at most once: a ring of trees is walked,
    taking one node of each tree that still has one, from where the last batch stopped; the pass ends when fewer than
    `mini_batch_size` trees have nodes left, and what they still have is dropped.

    Raises:
      ValueError: `mini_batch_size` is not positive or `epoch_passes` is negative.
    """
    if mini_batch_size < 1 or epoch_passes < 0:
        raise ValueError(f"expected mini_batch_size >= 1 and epoch_passes >= 0, got {mini_batch_size} and {epoch_passes}")
    groups: dict[Hashable, list[T]] = {}
    for tree, node in snapshot:
        groups.setdefault(tree, []).append(node)
    for epoch_pass in range(epoch_passes):
        ring = deque(deque(nodes) for nodes in groups.values())  # only trees with nodes left
        while len(ring) >= mini_batch_size:
            trees = [ring.popleft() for _ in range(mini_batch_size)]
            yield epoch_pass, [nodes.popleft() for nodes in trees]
            ring.extend(nodes for nodes in trees if nodes)
