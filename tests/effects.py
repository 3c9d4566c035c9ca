"""Lists of effects, looked at."""

from __future__ import annotations

from typing import TypeVar

from edgegossip.contract.protocol import Effect, Train, Work

T = TypeVar("T")


def only(kind: type[T], effects: list[Effect]) -> T:
    [found] = [effect for effect in effects if isinstance(effect, kind)]
    return found


def of_type(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def asked(train: Train) -> tuple[Work, float]:
    """How much is to be trained, and of what share of the data."""
    return train.work, train.keep_ratio
