"""Which server gets a request: the least loaded one, unless another one holds the prompt's beginning in its prefix cache."""

import collections
from collections.abc import Sequence

from deepgrpo.rollout.vllm_fleet import Replica
from deepgrpo.types import Ids

REMEMBERED = 200_000  # prefixes; the oldest are forgotten first
SLACK = 1.25  # load of a server with the prefix over that of the least loaded one, up to which it is preferred


class Router:
    """block: tokens of a prefix-cache block; only whole blocks are reused."""

    def __init__(self, block: int):
        self.block = block
        self._served: collections.OrderedDict[int, int] = collections.OrderedDict()  # hash of a prefix -> replica's index

    def choose(self, prompt: Ids, samples: int, replicas: Sequence[Replica]) -> Replica:
        """Of the replicas that may take it; notes that the prompt's blocks will be there."""
        least = min(replicas, key=lambda replica: (replica.generating, replica.index))
        if len(replicas) == 1:
            return least
        prefixes = self._prefixes(prompt)
        by_index = {replica.index: replica for replica in replicas}
        holders = (by_index.get(self._served.get(prefix)) for prefix in reversed(prefixes))
        holder = next((replica for replica in holders if replica is not None), None)
        close = holder is not None and holder.generating <= SLACK * least.generating + samples
        chosen = holder if close else least
        for prefix in prefixes:
            self._served[prefix] = chosen.index
            self._served.move_to_end(prefix)
        while len(self._served) > REMEMBERED:
            self._served.popitem(last=False)
        return chosen

    def forget(self) -> None:
        """New weights: the caches are empty."""
        self._served.clear()

    def _prefixes(self, prompt: Ids) -> list[int]:
        """A hash of each beginning of whole blocks, the shortest first."""
        found, running = [], 0
        for start in range(0, len(prompt) - self.block + 1, self.block):
            running = hash((running, prompt[start : start + self.block].tobytes()))
            found.append(running)
        return found
