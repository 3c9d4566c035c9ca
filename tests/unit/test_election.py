"""Elections of a parameter server's workers alone: candidates, voters, and times."""

from __future__ import annotations

import math
import random

import pytest

from edgegossip.algorithms.wrappers.standby.election import UNKNOWN, Age, Election
from edgegossip.contract.protocol import Effect, Message, Rank, Send, SetTimer

NUM = 5
NEW: Age = (0, 20)
OLD: Age = (0, 12)


def orphan(rank: Rank) -> Election:
    """One that has lost its server, rank 0."""
    election = Election(rank=rank, num_ranks=NUM)
    election.lose(0, 10.0)
    return election


def messages(effects: list[Effect]) -> dict[Rank, Message]:
    return {each.receiver: each.message for each in effects if isinstance(each, Send)}


def kinds(effects: list[Effect]) -> list[str]:
    return [each.message.kind for each in effects if isinstance(each, Send)]


def stand(election: Election, age: Age = NEW) -> dict[Rank, Message]:
    return messages(election.stand(age, 11.0))


def vote(voter: Election, candidate: Rank, asked: Message, age: Age = OLD) -> list[Effect]:
    return voter.vote(candidate, asked, age, may_stand=True, now=11.0)


def test_one_that_misses_its_server_stands_within_half_a_second() -> None:
    for rank in range(1, NUM):
        (timer,) = Election(rank=rank, num_ranks=NUM).lose(0, 10.0)
        assert isinstance(timer, SetTimer)
        assert 10.1 <= timer.at <= 10.5


def test_loss_of_another_worker_is_no_reason_to_stand() -> None:
    election = Election(rank=1, num_ranks=NUM)
    assert election.lose(2, 10.0) == []
    assert election.stand(NEW, 11.0) == []


def test_server_that_was_only_cut_off_is_followed_again() -> None:
    election = orphan(1)
    assert election.join(0, has_restarted=False, now=10.2) == [SetTimer("election", math.inf)]
    assert election.stand(NEW, 10.3) == []


def test_server_that_has_restarted_is_missed_all_the_same() -> None:
    election = orphan(1)
    election.join(0, has_restarted=True, now=10.2)
    assert election.misses_leader
    assert stand(election).keys() == {0, 2, 3, 4}


def test_votes_of_more_than_half_elect() -> None:
    candidate = orphan(1)
    asked = stand(candidate)
    assert asked.keys() == {2, 3, 4}
    (first,) = messages(vote(orphan(2), 1, asked[2])).values()
    (second,) = messages(vote(orphan(3), 1, asked[3])).values()
    assert not candidate.count(2, first)
    assert not candidate.count(2, first), "a vote counts once"
    assert candidate.count(3, second)
    told = candidate.lead()
    assert kinds(told) == ["lead"] * 3
    assert candidate.is_leading
    assert candidate.leader == 1


def test_terms_of_two_candidates_are_never_equal() -> None:
    terms = set()
    for rank in range(1, NUM):
        for promised in range(UNKNOWN, 3 * NUM):
            election = orphan(rank)
            election.promised = promised
            asked = stand(election)
            term = int(asked[1 + rank % (NUM - 1)].numbers["stands_for"])
            assert term > max(promised, 0)
            assert term % NUM == rank
            terms.add((term, rank))
    assert len({term for term, _ in terms}) == len(terms)


def test_nobody_votes_who_can_reach_its_server() -> None:
    follower = Election(rank=2, num_ranks=NUM)
    asked = stand(orphan(1))[2]
    (lead,) = messages(vote(follower, 1, asked)).values()
    assert (lead.kind, lead.round) == ("lead", 0)
    assert follower.promised == UNKNOWN


def test_nobody_votes_for_a_term_below_one_that_it_has_promised() -> None:
    voter = orphan(4)
    low, high = stand(orphan(1))[4], stand(orphan(2))[4]
    assert kinds(vote(voter, 2, high)) == ["vote"]
    (refusal,) = messages(vote(voter, 1, low)).values()
    assert refusal.kind == "promised"
    # The one that comes too late stands for a term that is higher.
    late = orphan(1)
    stand(late)
    late.heed(refusal)
    assert stand(late)[2].numbers["stands_for"] > high.numbers["stands_for"]


def test_candidate_repeats_its_term_as_long_as_no_higher_one_was_promised() -> None:
    candidate = orphan(1)
    first = stand(candidate)
    candidate.count(2, Message("vote", 0, numbers=first[2].numbers))
    again = stand(candidate)
    assert again.keys() == {3, 4}, "and does not ask who has voted"
    assert again[3].numbers == first[3].numbers


def test_votes_that_stay_split_are_given_anew_in_a_higher_term() -> None:
    candidate = orphan(1)
    first = stand(candidate)
    candidate.count(2, Message("vote", 0, numbers=first[2].numbers))
    for _ in range(6):
        assert stand(candidate)[3].numbers == first[3].numbers
    anew = stand(candidate)
    assert anew.keys() == {2, 3, 4}, "a vote of the old term does not count"
    assert anew[2].numbers["stands_for"] > first[2].numbers["stands_for"]


def test_one_with_a_newer_model_stands_itself_instead_of_voting() -> None:
    asked = stand(orphan(1), OLD)[2]
    newer = orphan(2)
    answer = vote(newer, 1, asked, NEW)
    assert kinds(answer) == ["stand"] * 3
    assert messages(answer)[1].numbers["stands_for"] > asked.numbers["stands_for"]


def test_model_of_a_later_term_is_newer_however_few_commits_it_has() -> None:
    asked = stand(orphan(1), (0, 100))[2]
    assert "vote" not in kinds(vote(orphan(2), 1, asked, (6, 3)))


def test_one_that_cannot_reach_most_does_not_stand() -> None:
    election = orphan(1)
    for rank in (2, 3):
        election.lose(rank, 10.0)
    assert stand(election) == {}
    election.join(2, has_restarted=False, now=11.0)
    assert stand(election).keys() == {2, 4}


def test_vote_of_one_that_has_restarted_since_does_not_count() -> None:
    candidate = orphan(1)
    asked = stand(candidate)
    ballot = Message("vote", 0, numbers=asked[2].numbers)
    candidate.count(2, ballot)
    candidate.join(2, has_restarted=True, now=11.0)
    assert not candidate.count(3, ballot)


def test_server_steps_down_for_one_of_a_higher_term() -> None:
    server = Election(rank=0, num_ranks=NUM, is_leading=True)
    server.follow(7, 20.0)
    assert not server.is_leading
    assert server.leader == 2


def test_server_that_could_not_reach_most_waits_until_most_confirm_it() -> None:
    server = Election(rank=0, num_ranks=NUM, is_leading=True)
    for rank in (2, 3, 4):
        server.lose(rank, 10.0)
    assert not server.may_merge
    assert kinds(server.join(2, has_restarted=False, now=20.0)) == ["lead"] * 2
    assert server.has_majority
    assert not server.may_merge, "they may follow another one by now"
    server.hear(1)
    assert not server.may_merge
    server.hear(2)
    assert server.may_merge


def test_attempts_come_further_and_further_apart() -> None:
    election, pauses = orphan(1), []
    for _ in range(12):
        (timer, *_) = election.stand(NEW, 0.0)
        assert isinstance(timer, SetTimer)
        pauses.append(timer.at)
    assert pauses[0] < 1.5
    assert all(pause < 16.0 for pause in pauses)
    assert min(pauses[-3:]) > max(pauses[:2])


@pytest.mark.parametrize("seed", range(20))
def test_messages_in_any_order_elect_no_two_in_one_term(seed: int) -> None:
    draw, ranks = random.Random(seed), range(1, NUM)
    elections = {rank: orphan(rank) for rank in ranks}
    ages = {rank: (0, draw.randrange(3)) for rank in ranks}
    voters: dict[int, set[Rank]] = {}
    leaders: dict[int, set[Rank]] = {}
    on_the_way: list[tuple[Rank, Rank, Message]] = []

    def send(rank: Rank, effects: list[Effect]) -> None:
        for receiver, message in messages(effects).items():
            if message.kind == "vote":
                voters.setdefault(int(message.numbers["stands_for"]), set()).add(rank)
            if draw.random() < 0.8 and receiver in ranks:
                on_the_way.append((rank, receiver, message))

    for _ in range(2000):
        if on_the_way and draw.random() < 0.8:
            sender, rank, message = on_the_way.pop(draw.randrange(len(on_the_way)))
            election = elections[rank]
            if message.kind == "stand":
                send(rank, election.vote(sender, message, ages[rank], True, 0.0))
            elif message.kind == "promised":
                election.heed(message)
            elif message.kind == "vote" and election.count(sender, message):
                send(rank, election.lead())
                leaders.setdefault(election.term, set()).add(rank)
                assert len(voters[election.term] | {rank}) > NUM // 2
        else:
            rank = draw.choice(ranks)
            send(rank, elections[rank].stand(ages[rank], 0.0))
    assert leaders
    assert all(len(found) == 1 for found in leaders.values())
