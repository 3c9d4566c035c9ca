"""Processes of one `torch.distributed` group that train one worker's model together.

The process of rank 0 in the group, the *lead*, takes part in the run; the others follow. They
talk through the group's store, not by collectives, because a process that waits there can be
interrupted, and because nobody has to be waiting when a process that fails says so.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from edgegossip.contract import errors
from edgegossip.contract.errors import EdgeGossipError, TrainingError
from edgegossip.contract.protocol import Seconds

_LOOK: Seconds = 1.0
"""Longest training between two looks, so that the end of a run reaches all processes soon."""
_MOST_STEPS = 10**9
_LONGEST_PAUSE: Seconds = 0.05
_LEFT = "left"
"""Key under which the first process that leaves before the end says why."""
_num_groups: Counter[str] = Counter()


@dataclass(slots=True, kw_only=True)
class StepTotals:
    """Some steps in a row, of one process or of all.

    Attributes:
        num_steps: Number of steps.
        num_samples: Samples in their batches.
        max_samples: Samples in the largest batch, or more.
        total_loss: Sum of the steps' losses.
        bad_loss: A loss that is not finite, as text; empty without one.
    """

    num_steps: int = 0
    num_samples: int = 0
    max_samples: int = 0
    total_loss: float = 0.0
    bad_loss: str = ""

    def add(self, loss: float | None, num_samples: int) -> None:
        """Record a step."""
        self.num_steps += 1
        self.num_samples += num_samples
        self.max_samples = max(self.max_samples, num_samples)
        if loss is None:
            return
        if math.isfinite(loss):
            self.total_loss += loss
        else:
            self.bad_loss = str(loss)

    def beside(self, others: list[StepTotals]) -> StepTotals:
        """Totals of the same steps in all processes: samples add, losses average.

        >>> one, other = StepTotals(), StepTotals()
        >>> one.add(1.0, num_samples=4)
        >>> other.add(3.0, num_samples=2)
        >>> one.beside([other])
        StepTotals(num_steps=1, num_samples=6, max_samples=6, total_loss=2.0, bad_loss='')
        """
        every = (self, *others)
        return StepTotals(
            num_steps=self.num_steps,
            num_samples=sum(each.num_samples for each in every),
            max_samples=sum(each.max_samples for each in every),
            total_loss=math.fsum(each.total_loss for each in every) / len(every),
            bad_loss=next((each.bad_loss for each in every if each.bad_loss), ""),
        )


class Processes:
    """The processes of a group, seen from one of them.

    All of them count their steps. At certain steps, which the lead announces each time, they
    *look up*: followers report their steps, and wait for the lead's news. Steps in between
    need no communication.

    Args:
        group: The group, of at least two processes.

    Attributes:
        rank: Rank of this process in the group.
        is_lead: Whether it is 0.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Not every build of PyTorch has these.
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self.rank = dist.get_rank(group)
        self.is_lead = self.rank == 0
        self._size = dist.get_world_size(group)
        # Processes make their loops in the same order, so equal numbers mean the same loop.
        name = "-".join(map(str, dist.get_process_group_ranks(group)))
        number = _num_groups[name] = _num_groups[name] + 1
        self._store = PrefixStore(f"edgegossip/{name}/{number}", _get_default_store())
        self._num_told = 0
        self._old: list[str] = []
        self._counted = StepTotals()
        self._steps_left = 1
        self._told_at = time.monotonic()
        self._step_time: Seconds = math.inf
        self._max_samples = 0

    def count(self, loss: float | None, num_samples: int) -> bool:
        """Record a step of this process; returns whether all processes now look up."""
        self._counted.add(loss, num_samples)
        self._steps_left -= 1
        return self._steps_left <= 0

    def report(self) -> StepTotals:
        """Steps since the last look: on a follower its own, which the lead is told.

        Returns:
            On the lead, the steps of all processes.

        Raises:
            EdgeGossipError: If another process has left.
        """
        own, self._counted = self._counted, StepTotals()
        if not self.is_lead:
            self._set(f"steps/{self._num_told}/{self.rank}", asdict(own))
            return own
        self._step_time = (time.monotonic() - self._told_at) / own.num_steps
        keys = [f"steps/{self._num_told}/{rank}" for rank in range(1, self._size)]
        total = own.beside([StepTotals(**self._wait(key)) for key in keys])
        self._max_samples = max(self._max_samples, total.max_samples)
        with _store_errors():
            for key in [*self._old, *keys]:  # everybody has read earlier news
                self._store.delete_key(key)
        self._old = []
        return total

    def tell(self, news: Mapping[str, Any], steps_due: float, samples_due: float) -> None:
        """Tell followers `news`, and when to look up next; see `steps_to_look`.

        Args:
            news: Anything that JSON can express.
            steps_due: Steps until the end of the current work; infinite if samples count.
            samples_due: Samples until then; infinite if steps count.
        """
        steps = steps_to_look(steps_due, samples_due, self._max_samples, self._step_time)
        key = f"news/{self._num_told}"
        self._set(key, {**news, "steps": steps})
        self._old.append(key)
        self._num_told += 1
        self._steps_left = steps
        self._told_at = time.monotonic()

    def hear(self) -> Mapping[str, Any]:
        """Wait for the lead's next news.

        Raises:
            EdgeGossipError: If another process has left.
        """
        news = self._wait(f"news/{self._num_told}")
        self._num_told += 1
        self._steps_left = news["steps"]
        return news

    def part(self) -> None:
        """Wait on the lead until followers have the final parameters; on them, say so.

        Without this, a lead whose script ends could close a connection that they still read.
        """
        if self.is_lead:
            for rank in range(1, self._size):
                self._wait(f"parted/{rank}")
        else:
            self._set(f"parted/{self.rank}", {})

    def leave(self, error: BaseException | None) -> None:
        """Say to the others, who may wait for this process, that it leaves before the end."""
        reason = "its loop ended before the run"
        kind = type(error).__name__
        if error is not None:
            reason = str(error) if isinstance(error, EdgeGossipError) else f"{kind}: {error}"
        # If the store's process has ended, the others notice that by themselves.
        with suppress(RuntimeError, TrainingError):
            if not self._store.check([_LEFT]):  # the first reason is the cause of the others
                self._set(_LEFT, {"rank": self.rank, "kind": kind, "reason": reason})

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        with _store_errors():
            self._store.set(key, json.dumps(value))

    def _wait(self, key: str) -> dict[str, Any]:
        """Wait for another process's value."""
        pause: Seconds = 1e-4
        with _store_errors():
            while not self._store.check([key]):
                if pause >= _LONGEST_PAUSE and self._store.check([_LEFT]):
                    raise _left(json.loads(self._store.get(_LEFT)))
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
            return dict(json.loads(self._store.get(key)))


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            "the process with the store of torch.distributed has ended, and so does this "
            "worker; the log of its processes tells why"
        ) from error


def steps_to_look(
    steps_due: float, samples_due: float, max_samples: int, step_time: Seconds
) -> int:
    """Steps until all processes look up: at the end of their work, or after a second.

    The look never comes after the end as long as no batch is larger than all before.

    Args:
        steps_due: Steps until the end of the current work.
        samples_due: Samples until then.
        max_samples: Samples of all processes in the largest batch so far; 0 before the first.
        step_time: Duration of a step in seconds; infinite before the first.

    >>> steps_to_look(30, math.inf, max_samples=8, step_time=0.001)
    30
    >>> steps_to_look(math.inf, 20, max_samples=8, step_time=0.001)
    3
    >>> steps_to_look(30, math.inf, max_samples=8, step_time=0.1)
    10
    >>> steps_to_look(30, math.inf, max_samples=0, step_time=math.inf)
    1
    """
    if math.isfinite(samples_due):
        steps_due = samples_due / max_samples if max_samples else 1
    soon = _LOOK / step_time if step_time > 0 else math.inf
    return max(1, math.ceil(min(steps_due, soon, _MOST_STEPS)))


def _left(said: Mapping[str, Any]) -> EdgeGossipError:
    kind = getattr(errors, said["kind"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, EdgeGossipError)
    make: Callable[[str], EdgeGossipError] = kind if is_ours else TrainingError  # type: ignore[assignment]
    return make(f"process {said['rank']} of this worker has left the run: {said['reason']}")
