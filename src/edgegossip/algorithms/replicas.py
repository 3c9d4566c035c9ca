"""Replicas: what both ends of each link know of the sender's estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.algorithms.push_sum_state import Offer
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

    def offers(
        self,
        estimate: Tensor,
        receivers: Sequence[Rank],
        compressor: Compressor,
        share: float,
        *key: int | str,
        kind: str,
    ) -> list[Offer]:
        """Bring what `receivers` know closer to `estimate`, and offer a share of it.

        Returns:
            An offer for all those who knew the same.
        """
        groups: dict[int, list[Rank]] = {}
        for j in receivers:
            groups.setdefault(id(self.sent.get(j, self.initial)), []).append(j)
        offers = []
        for group in groups.values():
            known = self.sent.get(group[0], self.initial)
            payload = compressor.compress(estimate - known, *key)
            known = known + compressor.decompress(payload, known.numel())
            self.sent.update(dict.fromkeys(group, known))
            offers.append(Offer(group, payload, known, share, kind))
        return offers

    def hear(self, sender: Rank, payload: Payload, compressor: Compressor) -> Tensor:
        """Follow `sender`; give what is known of it now, [num_params]."""
        known = self.heard.get(sender, self.initial)
        known = self.heard[sender] = known + compressor.decompress(payload, known.numel())
        return known

    def meet(self, neighbor: Rank, estimate: Tensor, *, is_sender: bool) -> None:
        """Begin anew with what both know; see `PushSum.meet`."""
        (self.heard if is_sender else self.sent)[neighbor] = estimate
