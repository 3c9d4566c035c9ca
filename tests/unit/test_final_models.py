"""The end of a run on real machines: whose models agree, and who is told if they do not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.small_runs import NUM_WORKERS
from tests.tiers import thorough
from tests.unit.test_training_loop import GOSGD, Learner, side_by_side
from tests.unit.test_training_loop_ends import make_loop, train
from tests.worker_folders import EXPERIMENT, make_folders

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.server.methods import BSP
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.cli.worker_command import _say_who_disagrees
from edgegossip.contract.protocol import (
    Message,
    Received,
    Send,
    Started,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete
from edgegossip.net.host.timing import Patience
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.agreement import Agreement, agreement_of, disagreements
from edgegossip.real.gather import gather
from edgegossip.real.gathering import WORKERS
from edgegossip.report.page import write_report
from edgegossip.runs.final_average import FinalAverage, FinalState, with_final_average
from edgegossip.runs.folder import load_results
from edgegossip.runs.results import Results

# Training loops.


@thorough
def test_the_final_average_waits_for_a_slow_worker_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The fast worker ends long before the slow one, which sends nothing in the meantime.
    monkeypatch.setattr("edgegossip.net.host.host.Patience", partial(Patience, slack=0.05))
    network, learners = MemoryNetwork(), [Learner(0), Learner(1)]
    algorithm = GoSGD(topology=complete(2), num_rounds=3, local_steps=8)
    loops = [
        make_loop(each, algorithm, rank, network, final_average=True)
        for rank, each in enumerate(learners)
    ]
    pauses = (0.0, 0.1)
    jobs = [partial(train, *each) for each in zip(learners, loops, pauses, strict=True)]
    assert side_by_side(*jobs) == [None, None]
    assert torch.equal(learners[0].values, learners[1].values)
    for loop in loops:
        assert loop.agreement is not None
        assert loop.agreement.members == (0, 1)
        assert loop.agreement.silent == ()


def test_a_loop_without_a_final_average_claims_no_agreement() -> None:
    assert make_loop(Learner(0), GOSGD, 0, MemoryNetwork()).agreement is None


# What one worker knows at its end.

NUM = 5
FINAL = FinalAverage(
    inner=GoSGD(topology=complete(NUM), num_rounds=9), num_workers=NUM, ends_at=8.0
)


def at_the_end(
    heard: dict[int, float], *, lost: tuple[int, ...] = (), algorithm: FinalAverage = FINAL
) -> FinalState:
    """The state of worker 0, whose model is 1, with others' models."""
    state = algorithm.init(0, torch.ones(2))
    algorithm.handle(state, Started(), 0.0)
    for rank in lost:
        algorithm.handle(state, WorkerLost(rank), 3.0 + rank)
    algorithm.handle(state, TimerFired("final average"), 8.0)
    for rank, value in heard.items():
        final = Message("final average", 0, {"params": torch.full((2,), value)})
        algorithm.handle(state, Received(rank, final), 9.0)
    algorithm.handle(state, TimerFired("final ask"), 100.0)
    return state


def names(state: FinalState, sender: int, *members: int) -> None:
    """Let worker `sender` name the members of its mean, whose models worker 0 has, too."""
    sums = torch.zeros(NUM, dtype=torch.int64)
    for rank in members:
        sums[rank] = state.means[0].get(rank, 1)
    message = Message("final members", 0, {"members": sums}, {"asks": 0})
    FINAL.handle(state, Received(sender, message), 101.0)


def known(state: FinalState, **options: Any) -> Agreement:  # noqa: ANN401
    left = options.pop("left", ())
    peers = [(rank, SimpleNamespace(has_left=rank in left)) for rank in range(1, NUM)]
    host: Any = SimpleNamespace(state=state, peers=peers)
    found = agreement_of(FINAL, host, **options)
    assert found is not None
    return found


def test_workers_that_all_share_a_mean_agree() -> None:
    state = at_the_end({1: 2.0, 2: 2.0, 3: 2.0, 4: 3.0})
    for rank in range(1, NUM):
        names(state, rank, 0, 1, 2, 3, 4)
        FINAL.handle(state, WorkerLost(rank), 102.0)  # finished, and gone
    found = known(state)
    assert [*found.lines()] == []
    assert not found.is_apart
    assert found.members == (0, 1, 2, 3, 4)
    assert found.distance == pytest.approx(0.5)


def test_a_minority_is_apart_and_a_majority_names_those_out_of_reach() -> None:
    many = known(at_the_end({2: 1.0, 3: 1.0}, lost=(1, 4)))
    assert not many.is_apart
    assert [*many.lines()] == [
        "worker 1, out of reach since 4.0 s, does not share this mean",
        "worker 4, out of reach since 7.0 s, does not share this mean",
    ]
    few = known(at_the_end({2: 1.0}, lost=(1, 3, 4)))
    assert few.is_apart
    # Those that left, or had finished before, have no other model of this run.
    assert not known(at_the_end({2: 1.0}, lost=(1, 3, 4)), ended=(3,), left=(4,)).is_apart


def test_a_worker_whose_model_never_came_and_one_with_another_mean_are_named() -> None:
    state = at_the_end({1: 1.0, 2: 1.0, 3: 1.0})
    names(state, 1, 0, 1, 2, 3)
    names(state, 2, 0, 1, 2, 3)
    names(state, 3, 0, 3)
    found = known(state)
    assert found.silent == (4,)
    assert found.others == (3,)
    assert not found.is_apart  # it agrees with 1 and 2, which are most of the others
    names(state, 2, 0, 3)
    assert known(state).is_apart
    names(state, 2, 0, 1, 2, 3)
    assert [*found.lines()] == [
        "worker 4 is in reach, but its final model did not arrive",
        "the final means of worker 3 are of other workers' models",
    ]


def test_one_that_trained_alone_says_so_even_if_the_last_mean_is_of_all() -> None:
    state = at_the_end({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0})
    state.round = 5
    assert not known(state).is_apart  # it may have had nothing to receive
    state.has_lost = True
    found = known(state)
    assert found.is_apart
    assert [*found.lines()] == ["this worker exchanged in 0 of 5 rounds, so it trained alone"]
    state.num_exchanged = 1
    assert not known(state).is_apart


def test_two_models_of_one_worker_do_not_pass_for_one() -> None:
    state = at_the_end({1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0})
    names(state, 1, 0, 1, 2, 3, 4)
    other = at_the_end({1: 2.0, 2: 2.0, 3: 2.0, 4: 2.5})  # worker 4 tells each another one
    names(other, 2, 0, 1, 2, 3, 4)
    FINAL.handle(state, Received(2, told_by(other)), 102.0)
    assert known(state).others == (2,)


@pytest.mark.parametrize("ends_itself", [True, False])
def test_a_final_model_says_whether_the_time_was_over(ends_itself: bool) -> None:
    state = FINAL.init(0, torch.ones(2))
    FINAL.handle(state, Started(), 0.0)
    state.is_ending = ends_itself
    effects = FINAL.handle(state, TimerFired("final average"), 8.0)
    finals = [each.message for each in effects if isinstance(each, Send)]
    assert {each.numbers["cut"] for each in finals} == {int(not ends_itself)}


def told_by(state: FinalState) -> Message:
    """The message about its mean that a worker sends to one that joins."""
    effects = FINAL.handle(state, WorkerJoined(1), 101.0)
    sent = [each.message for each in effects if isinstance(each, Send)]
    return next(each for each in sent if "members" in each.payload)


def test_a_process_has_one_final_model_and_answers_become_rare() -> None:
    state = at_the_end({1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0})
    mean = state.estimate
    final = Message("final average", 0, {"params": torch.full((2,), 9.0)})
    FINAL.handle(state, Received(4, final), 101.0)
    assert torch.equal(state.estimate, mean)
    FINAL.handle(state, WorkerJoined(4, has_restarted=True), 102.0)
    FINAL.handle(state, Received(4, final), 103.0)
    assert state.estimate.tolist() == pytest.approx([3.2, 3.2])
    nothing = {"members": torch.zeros(NUM, dtype=torch.int64)}
    ask = Received(4, Message("final members", 0, nothing, {"asks": 1}))
    answers = [len(FINAL.handle(state, ask, 104.0 + second)) for second in range(200)]
    assert sum(answers) == 2
    assert answers[0] == 1


# Which runs end with a mean.


def test_whole_models_are_averaged_and_parts_of_models_are_not() -> None:
    params = torch.zeros(8)
    gossip = EpochGossip(topology=complete(4), num_rounds=2)
    assert isinstance(with_final_average(gossip, 4, 9.0, params), FinalAverage)
    served = BSP(num_workers=3, num_rounds=2)
    assert isinstance(with_final_average(served, 4, 9.0, params), FinalAverage)
    shared = Shards(inner=served, num_servers=2)
    assert with_final_average(shared, 5, 9.0, params) is shared
    alone = Alone(num_rounds=2)
    assert with_final_average(alone, 4, 9.0, params) is alone


def test_a_server_on_standby_has_no_model_that_counts() -> None:
    elected = Standby(inner=BSP(num_workers=2, num_rounds=1))
    served = FinalAverage(inner=elected, num_workers=3)
    states = [served.init(rank, torch.full((2,), float(rank))) for rank in range(3)]
    for state in states:
        served.handle(state, Started(num_samples=1), 0.0)
    serving = [state.rank for state in states if state.inner.is_evaluated]
    for state in states:
        state.is_ending = True
        served.handle(state, TimerFired("nothing"), 1.0)
    worker = states[-1]
    for state in states:
        final = Message("final average", 0, {"params": state.models[state.rank]})
        if state.rank != worker.rank:
            served.handle(worker, Received(state.rank, final), 2.0)
    assert [*worker.means[worker.rank]] == serving == [0]
    assert torch.equal(worker.estimate, states[0].inner.estimate)


# Gathering.


def test_models_that_differ_are_named_with_their_distance() -> None:
    mean = torch.ones(4)
    apart = {"agreement": {"is_apart": True, "lines": ["worker 0 has been out of reach"]}}
    agrees = {"agreement": {"is_apart": False, "lines": []}}
    found = disagreements(
        {0: agrees, 1: apart, 2: {"agreement": None}},
        {0: mean * (1 + 1e-6), 1: mean * 1.5},
        mean,
    )
    assert found == [
        "worker 1 ended apart from the others: worker 0 has been out of reach",
        "the final model of worker 1 differs from the run's averaged model by 50 % of the norm",
    ]


@thorough
def test_gathered_results_say_that_models_differ(tmp_path: Path) -> None:
    make_folders(tmp_path)
    params = EXPERIMENT.workload().initial_params()
    end = {"reason": "finished", "seconds": 1.2, "wall_seconds": 1.2, "mean_staleness": 0.0}
    for rank in range(NUM_WORKERS):
        folder = tmp_path / WORKERS / str(rank)
        agreement = {"is_apart": False, "lines": []}
        (folder / "summary.json").write_text(json.dumps({**end, "agreement": agreement}))
        model = params * 2 if rank == 1 else params
        safetensors.torch.save_file({"params": model}, folder / "params.safetensors")
    results, _ = gather(EXPERIMENT, tmp_path)
    assert isinstance(results, Results)
    assert any("the final model of worker 1 differs" in each for each in results.disagreements)
    assert load_results(tmp_path).disagreements == results.disagreements
    written = json.loads((tmp_path / "summary.json").read_text())
    assert tuple(written["disagreements"]) == results.disagreements
    write_report(tmp_path)
    assert "The models differ." in (tmp_path / "report.html").read_text()
    # A worker that knows that it is apart, as a deposed server, does not count.
    apart = {"is_apart": True, "lines": ["worker 0 has been out of reach since 1.0 s"]}
    summary = tmp_path / WORKERS / "1" / "summary.json"
    kept = summary.read_text()
    summary.write_text(json.dumps({**end, "agreement": apart}))
    results, _ = gather(EXPERIMENT, tmp_path)
    assert isinstance(results, Results)
    expected = EXPERIMENT.workload().named_parameters(params)
    assert all(torch.equal(results.params[name], x) for name, x in expected.items())
    assert len(results.disagreements) == 2
    summary.write_text(kept)
    # Equal models give exactly their own mean, and nothing to say.
    path = tmp_path / WORKERS / "1" / "params.safetensors"
    safetensors.torch.save_file({"params": params}, path)
    results, _ = gather(EXPERIMENT, tmp_path)
    assert isinstance(results, Results)
    assert results.disagreements == ()
    assert "disagreements" not in json.loads((tmp_path / "summary.json").read_text())
    assert all(torch.equal(results.params[name], x) for name, x in expected.items())


def test_models_that_differ_have_an_exit_code_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _say_who_disagrees(("worker 1 ended apart",)) == 3
    assert capsys.readouterr().err == "warning: the models differ: worker 1 ended apart\n"
    assert _say_who_disagrees(()) == 0
