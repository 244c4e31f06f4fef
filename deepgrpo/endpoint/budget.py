"""What may still be spent at an endpoint, in tokens and in money."""

from collections import Counter
from typing import NamedTuple

import ml_collections


class Cost(NamedTuple):
    """Tokens of prompts and of completions."""

    prompt: int
    completion: int


class Budget:
    """Limits over the client's counters. A request reserves the most that it may cost until its reply is paid.

    What is spent and reserved stays within the limits, but for one request that is alone in flight.
    """

    def __init__(self, counts: Counter, section: ml_collections.ConfigDict):
        """counts: shared with the client. section: of the endpoint; its limits are 0 for none, its prices of a million tokens."""
        self._counts, self._tokens, self._money = counts, section.token_budget, section.money_budget
        self._prices = Cost(*(price / 1e6 for price in section.prices))
        self._reserved: list[Cost] = []
        self._dearest = 0  # completion tokens of the longest reply so far

    def charge(self, cost: Cost, of_use: bool = True) -> None:
        """Counts what was paid. of_use: for a reply that the run uses; what failed counts against the limits only."""
        lost = "" if of_use else "http_lost_"
        self._counts[f"{lost}prompt_tokens"] += cost.prompt
        self._counts[f"{lost}completion_tokens"] += cost.completion
        self._dearest = max(self._dearest, cost.completion)

    def reserve(self, most: Cost) -> Cost | None:
        """Sets aside what a request may cost; None while it does not fit beside what is in flight."""
        most = Cost(most.prompt, max(most.completion, self._dearest))
        if self._reserved and self._exceeded(self._sum([self._paid(), *self._reserved, most]), by=1):
            return None
        self._reserved.append(most)
        return most

    def release(self, reserved: Cost) -> None:
        self._reserved.remove(reserved)

    def spent(self) -> bool:
        return self._exceeded(self._paid())

    def money(self) -> float:
        """Of the replies that the run uses."""
        return self._price(Cost(self._counts["prompt_tokens"], self._counts["completion_tokens"]))

    def __str__(self) -> str:
        paid = self._paid()
        return f"spent {sum(paid)} of {self._tokens or 'any'} tokens, money {self._price(paid):.4f} of {self._money or 'any'}"

    def _paid(self) -> Cost:
        return self._sum(
            [Cost(self._counts[f"{lost}prompt_tokens"], self._counts[f"{lost}completion_tokens"]) for lost in ("", "http_lost_")]
        )

    def _price(self, cost: Cost) -> float:
        return sum(tokens * price for tokens, price in zip(cost, self._prices, strict=True))

    def _exceeded(self, cost: Cost, by: int = 0) -> bool:
        return bool((self._tokens and sum(cost) >= self._tokens + by) or (self._money and self._price(cost) >= self._money))

    @staticmethod
    def _sum(costs: list[Cost]) -> Cost:
        return Cost(sum(cost.prompt for cost in costs), sum(cost.completion for cost in costs))
