"""Replicas: copies of the sender's estimate at both ends of each link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.algorithms.push_sum.push_sum import Offer
from edgegossip.compression.compressor import Compressor
from edgegossip.contract import Payload, Rank


@dataclass(slots=True, eq=False)
class Replicas:
    r"""Copies of the senders' estimates, at both ends of each link.

    Receivers with the same copy share one tensor and one payload for the next difference.

    Attributes:
        initial: Initial copy of every estimate, [num_params].
        sent: Copies of this worker's estimate, by receiver.
        heard: Copies of the others' estimates, by sender.
    """

    initial: Tensor
    sent: dict[Rank, Tensor] = field(default_factory=dict)
    heard: dict[Rank, Tensor] = field(default_factory=dict)

    def offers(
        self,
        estimate: Tensor,
        receivers: Sequence[Rank],
        compressor: Compressor,
        *key: int | str,
        kind: str,
    ) -> list[Offer]:
        """Move the copies of `receivers` closer to `estimate`, and offer them.

        Returns:
            One offer for each group of receivers with the same copy.
        """
        # By identity, which is cheap: receivers share a copy as long as they get the same
        # messages. A link that restarts has a copy of its own.
        groups: dict[int, list[Rank]] = {}
        for j in receivers:
            groups.setdefault(id(self.sent.get(j, self.initial)), []).append(j)
        offers = []
        for group in groups.values():
            known = self.sent.get(group[0], self.initial)
            payload = compressor.compress(estimate - known, *key)
            known = known + compressor.decompress(payload, known.numel())
            # The copy follows what the receivers decode, not the estimate, so that compression
            # errors are part of the next difference.
            self.sent.update(dict.fromkeys(group, known))
            offers.append(Offer(group, payload, known, kind))
        return offers

    def hear(self, sender: Rank, payload: Payload, compressor: Compressor) -> Tensor:
        """Apply an update of `sender`; return the new copy of its estimate, [num_params]."""
        known = self.heard.get(sender, self.initial)
        known = self.heard[sender] = known + compressor.decompress(payload, known.numel())
        return known

    def meet(self, neighbor: Rank, estimate: Tensor, *, is_sender: bool) -> None:
        """Restart from an estimate that both ends know; see `PushSum.meet`."""
        (self.heard if is_sender else self.sent)[neighbor] = estimate
