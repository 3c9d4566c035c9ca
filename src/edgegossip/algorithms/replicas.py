"""Replicas: what both ends of each link know of the sender's estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.core.compression.compressor import Compressor
from edgegossip.core.protocol import Payload, Rank


@dataclass(slots=True, eq=False)
class Replicas:
    r"""What both ends of each link know of the sender's estimate.

    Receivers that have been told the same share one tensor, and so are told the next
    difference in one payload.

    Attributes:
        initial: What all know of everybody at first, [num_params].
        sent: What others know of this worker, by receiver.
        heard: What it knows of others, by sender.
    """

    initial: Tensor
    sent: dict[Rank, Tensor] = field(default_factory=dict)
    heard: dict[Rank, Tensor] = field(default_factory=dict)

    def send(
        self,
        estimate: Tensor,
        receivers: Sequence[Rank],
        compressor: Compressor,
        *key: int | str,
    ) -> Iterator[tuple[list[Rank], Payload, Tensor]]:
        """Bring what `receivers` know closer to `estimate`.

        Returns:
            For all those who knew the same: who they are, what they are sent, and what they
            know from then on, [num_params].
        """
        groups: dict[int, list[Rank]] = {}
        for j in receivers:
            groups.setdefault(id(self.sent.get(j, self.initial)), []).append(j)
        for group in groups.values():
            known = self.sent.get(group[0], self.initial)
            payload = compressor.compress(estimate - known, *key)
            known = known + compressor.decompress(payload, known.numel())
            self.sent.update(dict.fromkeys(group, known))
            yield group, payload, known

    def hear(self, sender: Rank, payload: Payload, compressor: Compressor) -> Tensor:
        """Follow `sender`; give what is known of it now, [num_params]."""
        known = self.heard.get(sender, self.initial)
        known = self.heard[sender] = known + compressor.decompress(payload, known.numel())
        return known

    def meet(self, neighbor: Rank, estimate: Tensor, *, is_sender: bool) -> None:
        """Begin anew with what both know; see `PushSum.meet`."""
        (self.heard if is_sender else self.sent)[neighbor] = estimate
