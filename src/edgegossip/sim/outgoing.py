"""Sent messages: their sizes, and whether the algorithm's schema describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from edgegossip.core import codec
from edgegossip.core.algorithm import Algorithm
from edgegossip.core.errors import LocalProtocolError
from edgegossip.core.protocol import Message, Rank
from edgegossip.core.schema import MessageSpec, require_described

InitialParams: TypeAlias = Tensor | Callable[[Rank], Tensor]
_MOST_FORMS = 4096


def initial_params_of(given: InitialParams, rank: Rank) -> Tensor:
    """The initial parameters of worker `rank`, [num_params]."""
    return given if isinstance(given, Tensor) else given(rank)


class Outgoing:
    """Measures each form of message, and checks it against the schema, when it is first sent.

    Messages have one form if they agree in kind, names, types and shapes. An algorithm without
    a schema may send anything.

    Args:
        algorithm: Algorithm of the workers.
        initial_params: Initial parameters of every worker, or a function of the rank.
    """

    def __init__(self, algorithm: Algorithm[Any], initial_params: InitialParams) -> None:
        self._algorithm = algorithm
        self._initial_params = initial_params
        # By length of the initial parameters, which differs between roles.
        self._schemas: dict[int, Mapping[str, MessageSpec] | None] = {}
        self._sizes: dict[tuple[object, ...], int] = {}

    def num_bytes(self, sender: Rank, message: Message) -> int:
        """The size of a message of worker `sender`, in bytes.

        Raises:
            UndescribedError: If the schema does not describe the message.
        """
        form: tuple[object, ...] = codec.form(message)
        if message.numbers:
            form = *form, *message.numbers
        if (size := self._sizes.get(form)) is None:
            if (schema := self._schema(sender)) is not None:
                require_described(schema, message, sender)
            if len(self._sizes) == _MOST_FORMS:  # compressed messages may have any length
                self._sizes.clear()
            size = self._sizes[form] = codec.num_bytes(message)
        return size

    def _schema(self, rank: Rank) -> Mapping[str, MessageSpec] | None:
        params = initial_params_of(self._initial_params, rank)
        if len(params) not in self._schemas:
            try:
                self._schemas[len(params)] = self._algorithm.schema(params)
            except LocalProtocolError:
                self._schemas[len(params)] = None
        return self._schemas[len(params)]
