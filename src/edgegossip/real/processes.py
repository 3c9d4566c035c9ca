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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from edgegossip.contract import errors
from edgegossip.contract.errors import EdgeGossipError, TrainingError
from edgegossip.contract.protocol import Seconds

_LOOK: Seconds = 1.0
"""Longest training between two looks, so that the end of a run reaches all processes soon."""
_LONGEST_PAUSE: Seconds = 0.05
_LEFT = "left"
"""Key under which the first process that leaves before the end says why."""
_num_groups: Counter[str] = Counter()


@dataclass(frozen=True, kw_only=True)
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

    @classmethod
    def of_step(cls, loss: float | None, num_samples: int) -> StepTotals:
        """Totals of one step."""
        is_bad = loss is not None and not math.isfinite(loss)
        return cls(
            num_steps=1,
            num_samples=num_samples,
            max_samples=num_samples,
            total_loss=0.0 if is_bad else loss or 0.0,
            bad_loss=str(loss) if is_bad else "",
        )

    def then(self, later: StepTotals) -> StepTotals:
        """Totals of these steps and later ones of the same process."""
        return StepTotals(
            num_steps=self.num_steps + later.num_steps,
            num_samples=self.num_samples + later.num_samples,
            max_samples=max(self.max_samples, later.max_samples),
            total_loss=self.total_loss + later.total_loss,
            bad_loss=self.bad_loss or later.bad_loss,
        )

    def beside(self, others: list[StepTotals]) -> StepTotals:
        """Totals of the same steps in all processes: samples add, losses average."""
        every = [self, *others]
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

    def count(self, loss: float | None, num_samples: int) -> StepTotals | None:
        """Record a step of this process.

        Returns:
            None before the next look. On the lead, the steps of all processes since the last
            one; on a follower, its own, which the lead knows now.

        Raises:
            EdgeGossipError: If another process has left.
        """
        self._counted = self._counted.then(StepTotals.of_step(loss, num_samples))
        self._steps_left -= 1
        if self._steps_left > 0:
            return None
        own, self._counted = self._counted, StepTotals()
        if not self.is_lead:
            self._set(f"steps/{self._num_told}/{self.rank}", asdict(own))
            return own
        self._step_time = (time.monotonic() - self._told_at) / own.num_steps
        keys = [f"steps/{self._num_told}/{rank}" for rank in range(1, self._size)]
        total = own.beside([StepTotals(**self._wait(key)) for key in keys])
        self._max_samples = max(self._max_samples, total.max_samples)
        for key in [*self._old, *keys]:  # everybody has read earlier news
            self._store.delete_key(key)
        self._old = []
        return total

    def tell(self, news: Mapping[str, Any], steps_due: float, samples_due: float) -> None:
        """Tell followers `news`, and when to look up next.

        That is at the end of the current work, or after a second of training if the end is
        farther away. It is never too late: a batch is assumed to be as large as the largest
        so far.

        Args:
            news: Anything that JSON can express.
            steps_due: Steps until the end, if known.
            samples_due: Samples until the end, if known.
        """
        if math.isfinite(samples_due):
            # With no batch seen, the first one shows their size.
            steps_due = samples_due / self._max_samples if self._max_samples else 1
        soon = _LOOK / self._step_time if self._step_time > 0 else math.inf
        steps = max(1, math.ceil(min(steps_due, max(1.0, soon // 1), 2**31)))
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

    def leave(self, error: BaseException | None) -> None:
        """Say to the others, who may wait for this process, that it leaves before the end."""
        reason = "its loop ended before the run"
        kind = type(error).__name__
        if error is not None:
            reason = str(error) if isinstance(error, EdgeGossipError) else f"{kind}: {error}"
        try:
            if not self._store.check([_LEFT]):  # the first reason is the cause of the others
                self._set(_LEFT, {"rank": self.rank, "kind": kind, "reason": reason})
        except RuntimeError:
            pass  # the store's process has ended, which the others notice by themselves

    def _set(self, key: str, value: Mapping[str, Any]) -> None:
        self._store.set(key, json.dumps(value))

    def _wait(self, key: str) -> dict[str, Any]:
        """Wait for another process's value."""
        pause: Seconds = 1e-4
        try:
            while not self._store.check([key]):
                if pause == _LONGEST_PAUSE and self._store.check([_LEFT]):
                    raise _left(json.loads(self._store.get(_LEFT)))
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            return dict(json.loads(self._store.get(key)))
        except RuntimeError as error:
            raise TrainingError(
                "the process with the store of torch.distributed has ended, and this worker "
                "with it; the log of its processes tells why"
            ) from error


def _left(said: Mapping[str, Any]) -> EdgeGossipError:
    kind = getattr(errors, said["kind"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, EdgeGossipError)
    make: Callable[[str], EdgeGossipError] = kind if is_ours else TrainingError  # type: ignore[assignment]
    return make(f"process {said['rank']} of this worker has left the run: {said['reason']}")
