"""The members of a run: who has been invited, who holds which rank, and who is banned."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgegossip.contract.errors import NetworkError
from edgegossip.machine.files import locked_file
from edgegossip.net.identity.certificates import authority_paths, read_file, write_file
from edgegossip.net.identity.invitation import new_token, token_id, token_key
from edgegossip.net.identity.revocation import revoke

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from edgegossip.contract.protocol import Rank, Seconds

NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""Names of machines."""
_ENDING = ".members.json"
_REMEMBERED: Seconds = 86_400.0
"""Time for which a spent or expired token is remembered, so that its user learns the reason."""


@dataclass(frozen=True, slots=True)
class Member:
    """A machine that has joined.

    Args:
        rank: Its rank.
        name: Its name, unique in the run.
        key: SHA-256 of its public key, in hex; empty for a banned name without one.
        serial: Serial number of its certificate, in hex.
        state: "left" and "banned" members' certificates are revoked, and their ranks are free.
        joined: Time at which it joined last, in seconds since 1970.
        seen: Time at which a router saw it last; None if never.
    """

    rank: Rank
    name: str
    key: str
    serial: str
    state: Literal["member", "left", "banned"]
    joined: Seconds
    seen: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """An invitation that is open or was.

    Args:
        id: See `token_id`.
        key: See `token_key`, in hex; empty when the token is spent.
        end: Time at which it expires, in seconds since 1970.
    """

    id: str
    key: str
    end: Seconds


class Members:
    """The file of a run's members and open invitations, beside the authority's key.

    Several processes may use one file. It holds no token that could be read back, but the key
    of an open one, and is readable only by its owner.

    Args:
        folder: Folder of the authority.
        run: Name of the run.
        clock: Returns the time in seconds since 1970.
    """

    def __init__(
        self, folder: Path, run: str, clock: Callable[[], Seconds] = time.time
    ) -> None:
        self.folder = folder
        self.run = run
        self.path = folder / f"{run}{_ENDING}"
        self.clock = clock

    @classmethod
    def all_in(cls, folder: Path) -> list[Members]:
        """Files of all runs in the authority's folder."""
        return [
            cls(folder, path.name.removesuffix(_ENDING))
            for path in sorted(folder.glob(f"*{_ENDING}"))
        ]

    def invite(self, seconds: Seconds = 3600.0) -> bytes:
        """Draw a token that works once, for `seconds`."""
        token = new_token()
        with self._changing() as book:
            entry = Token(token_id(token), token_key(token).hex(), self.clock() + seconds)
            book.tokens.append(entry)
        return token

    def key_of(self, id: str) -> bytes:
        """The key of an open invitation.

        Raises:
            NetworkError: If the invitation is unknown, spent or expired.
        """
        return self._key(self._read(), id)

    def admit(
        self,
        id: str,
        name: str,
        key: str,
        num_workers: int,
        sign: Callable[[Rank], str],
        *,
        is_chosen: bool = True,
    ) -> Member:
        """Spend an invitation, and give a machine a rank and a certificate.

        A machine that comes back with its name and its key gets its rank again, and so does a
        name that has left. Otherwise the machine gets the lowest rank that was never given,
        or the lowest one that is free.

        Args:
            id: Name of the token.
            name: Name of the machine.
            key: SHA-256 of its public key, in hex.
            num_workers: Limit of the run.
            sign: Signs the certificate of a rank and returns its serial number, in hex.
            is_chosen: Whether a person has chosen `name`; otherwise a number may be appended.

        Raises:
            NetworkError: If the invitation is not open, the name is another machine's, the name
                or the key is banned, or no rank is free. The invitation then stays open.
        """
        with self._changing() as book:
            self._key(book, id)  # again, as another process may have spent it meanwhile
            banned = [each for each in book.members if each.state == "banned"]
            if any(each.name == name or each.key == key for each in banned):
                raise NetworkError(f"{name!r} is banned from run {self.run!r}")
            if not is_chosen:
                name = _free_name(name, key, book.members)
            known = next((each for each in book.members if each.name == name), None)
            if known is not None and known.state == "member" and known.key != key:
                raise NetworkError(
                    f"another machine of run {self.run!r} has the name {name!r}; choose "
                    "another one (--name), or let that machine leave first"
                )
            rank = _rank(known, book.members, num_workers)
            # Spent before the certificate exists: a failure may cost an invitation, but no
            # invitation gives two certificates.
            book.tokens = [replace(t, key="") if t.id == id else t for t in book.tokens]
            book.save()
            if known is not None and known.state == "member":
                revoke(self.folder, serials=[int(known.serial, 16)], holders=self._copies())
            member = Member(rank, name, key, sign(rank), "member", self.clock())
            book.members = [each for each in book.members if each is not known]
            book.members.append(member)
        return member

    def renumber(self, ranks: Mapping[Rank, Rank]) -> None:
        """Give members other ranks, before a run begins that has only these members.

        All others lose theirs and have left. A member whose rank has changed needs a new
        certificate; see `renew`.

        Args:
            ranks: New rank of each member, by its present rank.
        """
        for each in self.rows():
            if each.state == "member" and each.rank not in ranks:
                self.remove(each.name, "left")
        with self._changing() as book:
            book.members = [
                replace(each, rank=ranks[each.rank]) if each.state == "member" else each
                for each in book.members
            ]

    def renew(self, name: str, sign: Callable[[Rank], str]) -> None:
        """Replace the certificate of a member by one for its present rank.

        Args:
            name: Name of the member.
            sign: As in `admit`.
        """
        with self._changing() as book:
            known = next(each for each in book.members if each.name == name)
            after = replace(known, serial=sign(known.rank))
            # The former one may be for a rank that now is another member's.
            revoke(self.folder, serials=[int(known.serial, 16)], holders=self._copies())
            book.members = [after if each is known else each for each in book.members]

    def remove(self, name: str, state: Literal["left", "banned"]) -> Member | None:
        """Revoke the certificate of a member, whose rank becomes free.

        Returns:
            The member; None if a name was banned that no machine has.

        Raises:
            NetworkError: If a member leaves that the run does not have.
        """
        with self._changing() as book:
            known = next((each for each in book.members if each.name == name), None)
            if known is None:
                if state == "left":
                    raise NetworkError(f"run {self.run!r} has no member {name!r}")
                book.members.append(Member(-1, name, "", "", "banned", self.clock()))
                return None
            if known.state == "member":
                revoke(self.folder, serials=[int(known.serial, 16)], holders=self._copies())
            # Nobody who was banned becomes a member that has left.
            state = "banned" if known.state == "banned" else state
            after = replace(known, state=state)
            book.members = [after if each is known else each for each in book.members]
        return after

    def saw(self, ranks: Collection[Rank]) -> None:
        """Note that members with these ranks are present."""
        with self._changing() as book:
            book.members = [
                replace(each, seen=self.clock())
                if each.rank in ranks and each.state == "member"
                else each
                for each in book.members
            ]

    def rows(self) -> list[Member]:
        """All members, by rank; those who have left or are banned come last."""
        order = {"member": 0, "left": 1, "banned": 2}
        return sorted(self._read().members, key=lambda each: (order[each.state], each.rank))

    def holder(self, serial: int) -> Member | None:
        """The member, at present or formerly, with this certificate."""
        found = (each for each in self.rows() if each.serial == f"{serial:x}")
        return next(found, None)

    def _key(self, book: _Book, id: str) -> bytes:
        token = next((each for each in book.tokens if each.id == id), None)
        if token is None:
            raise NetworkError("this invitation is unknown; ask for a new one")
        if not token.key:
            raise NetworkError("this invitation has been used; each works once")
        if token.end <= self.clock():
            raise NetworkError("this invitation has expired; ask for a new one")
        return bytes.fromhex(token.key)

    def _copies(self) -> set[Path]:
        """Folders of workers and routers on this machine, which get the list of revocations."""
        return {path.parent for path in self.folder.parent.glob("*/ca.pem")} - {self.folder}

    @contextmanager
    def _changing(self) -> Iterator[_Book]:
        if not authority_paths(self.folder)[0].exists():
            raise NetworkError(f"{self.folder} has no authority; see: edgegossip invite")
        with locked_file(self.path.with_name(f".{self.path.name}.lock"), wait=True):
            book = self._read()
            yield book
            oldest = self.clock() - _REMEMBERED
            book.tokens = [each for each in book.tokens if each.end > oldest]
            book.save()

    def _read(self) -> _Book:
        if not self.path.exists():
            return _Book(self.path, [], [])
        try:
            found = json.loads(read_file(self.path))
            members = [Member(**each) for each in found["members"]]
            tokens = [Token(**each) for each in found["tokens"]]
            return _Book(self.path, members, tokens)
        except (ValueError, KeyError, TypeError):
            raise NetworkError(
                f"{self.path} is damaged; remove it, and invite all machines again"
            ) from None


@dataclass(slots=True)
class _Book:
    path: Path
    members: list[Member]
    tokens: list[Token]

    def save(self) -> None:
        content = {
            "members": [asdict(each) for each in self.members],
            "tokens": [asdict(each) for each in self.tokens],
        }
        write_file(self.path, json.dumps(content, indent=1).encode(), mode=0o600)


def _rank(known: Member | None, members: Collection[Member], num_workers: int) -> Rank:
    taken = {each.rank for each in members if each.state == "member"}
    if known is not None and (known.state == "member" or known.rank not in taken):
        own: Rank = known.rank
        return own
    given = {each.rank for each in members}
    # A rank that someone else had is taken last: if its former owner returns, it is missed.
    free: list[Rank] = sorted(
        {*range(num_workers)} - taken, key=lambda rank: (rank in given, rank)
    )
    for rank in free:
        return rank
    raise NetworkError(
        f"the run has its {num_workers} workers; another machine can join after one has left"
    )


def _free_name(name: str, key: str, members: Collection[Member]) -> str:
    others = {each.name for each in members if each.key != key}
    number, free = 1, name
    while free in others:
        number += 1
        free = f"{name}-{number}"
    return free
