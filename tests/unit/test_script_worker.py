"""A script's process as a worker: which one it is, its data, its loop, its optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.script_workers import workers_in_threads
from tests.tiers import thorough
from torch import Tensor, nn

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.errors import NetworkError, TrainingError, UsageError
from edgegossip.contract.topology import complete, ring
from edgegossip.net.address import Address
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.join import Connection
from edgegossip.real.script import ScriptWorker, local_workers
from edgegossip.real.training_loop import TrainingLoop
from edgegossip.recipes.script_averaging import averaging

SET = {"EDGEGOSSIP_RANK": "1", "EDGEGOSSIP_NUM_WORKERS": "2"}


def test_the_variables_of_a_worker_make_the_same_worker() -> None:
    for worker in local_workers(3, "night"):
        assert worker.connection is not None
        assert ScriptWorker.from_environment(worker.environment()) == worker
        assert len(worker.connection.address.connect) == 2
    assert ScriptWorker.from_environment({}) == ScriptWorker()


def test_a_folder_of_certificates_is_handed_on(tmp_path: Path) -> None:
    address = Address(listen=("tls/127.0.0.1:0",))
    worker = ScriptWorker(
        rank=1, num_workers=2, connection=Connection(address=address, tls=tmp_path)
    )
    again = ScriptWorker.from_environment(worker.environment())
    assert again.connection is not None
    assert again.connection.tls == str(tmp_path)


def test_everything_about_the_connection_is_handed_on() -> None:
    connection = Connection(
        address=Address(connect=("tcp/10.0.0.1:7447",), multicast=True),
        ban=("a1b2", "c3"),
        insecure=True,
        lease=30.5,
        upload_limit="10mbit",
    )
    worker = ScriptWorker(rank=1, num_workers=2, connection=connection)
    assert ScriptWorker.from_environment(worker.environment()) == worker


def test_a_worker_inherits_no_variables_of_another() -> None:
    outer = {"EDGEGOSSIP_TLS": "certs", "EDGEGOSSIP_INSECURE": "1", "EDGEGOSSIP_LEASE": "60"}
    for worker in (ScriptWorker(), *local_workers(2, "night", lease=9.0)):
        assert ScriptWorker.from_environment({**outer, **worker.environment()}) == worker


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"EDGEGOSSIP_RANK": "0"}, "no way to any other worker"),
        (SET, "no way to any other worker"),
        ({**SET, "EDGEGOSSIP_INSECURE": "1"}, "no way to any other worker"),
        ({**SET, "EDGEGOSSIP_LISTEN": "7447"}, "listen has '7447'; an endpoint is tcp/HOST"),
        (
            {**SET, "EDGEGOSSIP_RANK": "2", "EDGEGOSSIP_LISTEN": "tcp/127.0.0.1:0"},
            r"rank must be in 0..1, got 2; start the script with `edgegossip script`",
        ),
        (
            {"EDGEGOSSIP_RANK": "0", "EDGEGOSSIP_LISTEN": "tcp/127.0.0.1:0"},
            "EDGEGOSSIP_NUM_WORKERS must be a whole number, got ''",
        ),
        ({**SET, "EDGEGOSSIP_MULTICAST": "yes"}, "EDGEGOSSIP_MULTICAST must be 1 or 0, got"),
        (
            {**SET, "EDGEGOSSIP_MULTICAST": "1", "EDGEGOSSIP_LEASE": "long"},
            "EDGEGOSSIP_LEASE must be a number of seconds, got 'long'",
        ),
        (
            {**SET, "EDGEGOSSIP_MULTICAST": "1", "EDGEGOSSIP_LEASE": "nan"},
            "lease must be from 0.1 to 3600 seconds",
        ),
    ],
)
def test_variables_that_do_not_fit_together_are_refused(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ScriptWorker.from_environment(variables)


def test_several_workers_need_a_way_to_each_other() -> None:
    with pytest.raises(ValueError, match="one of 2 workers needs a connection"):
        ScriptWorker(rank=0, num_workers=2)
    assert ScriptWorker().num_workers == 1


class Chosen(list[int]):
    """A data set of Hugging Face, as far as shares need it."""

    def select(self, indices: range) -> list[int]:
        return [self[i] for i in indices]


def worker(rank: int, num_workers: int) -> ScriptWorker:
    transport = MemoryNetwork().transport(rank)
    return ScriptWorker(rank=rank, num_workers=num_workers, transport=transport)


@pytest.mark.parametrize("kind", [list, Chosen, torch.tensor])
def test_all_workers_get_equally_many_samples_of_their_own(kind: type[list[int]]) -> None:
    samples = kind(range(11))
    shares = [[*worker(rank, 3).own_share(samples)] for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert ScriptWorker().own_share(samples) is samples


def test_a_stream_has_no_share() -> None:
    with pytest.raises(TypeError, match="generator cannot be indexed by number"):
        worker(0, 2).own_share(x for x in range(3))


def test_an_algorithm_for_another_number_of_workers_is_refused() -> None:
    three = Gossip(topology=complete(3), num_rounds=1)
    with pytest.raises(ValueError, match="topology has 3 workers, but 2 take part"):
        worker(0, 2).training_loop(nn.Linear(1, 1), three, num_samples=1)


def test_averaging_goes_by_the_steps_of_the_script() -> None:
    assert averaging(every=3, topology=ring)(4, 10) == Gossip(
        topology=ring(4), num_rounds=3, local_steps=3
    )
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        averaging(every=0)
    with pytest.raises(ValueError, match="at most the script's number of steps, 2, got 3"):
        averaging(every=3)(4, 2)


class Script:
    """A script with AdamW whose trunk is frozen, and that may go on after the end."""

    def __init__(self, rank: int, num_samples: int = 24) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        for parameter in self.model[0].parameters():
            parameter.requires_grad_(False)
        self.named = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        random = torch.Generator().manual_seed(rank)
        self.x = torch.randn(num_samples, 4, generator=random)

    def step(self, number: int) -> float:
        x = self.x[4 * number % len(self.x) :][:4]
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def train(script: Script, loop: TrainingLoop) -> None:
    number = 0
    with loop:
        while not loop.is_over:
            loop.step(script.step(number), 4)
            number += 1


def loop_of(worker: ScriptWorker, script: Script, num_steps: int = 3) -> TrainingLoop:
    return worker.training_loop(
        script.model, averaging(), num_samples=len(script.x), num_steps=num_steps
    )


def test_adamw_keeps_its_state_over_exchanges() -> None:
    """By hand: two scripts whose trained parameters are averaged, and nothing else."""
    scripts = [Script(0), Script(1)]

    def go(each: ScriptWorker) -> None:
        script = scripts[each.rank]
        train(
            script, each.training_loop(script.model, averaging(), num_samples=24, num_steps=9)
        )

    assert workers_in_threads(2, go) == [None, None]
    by_hand = [Script(0), Script(1)]
    for number in range(9):
        for script in by_hand:
            script.step(number)
        average([script.model for script in by_hand])
    for ours, theirs in zip(scripts, by_hand, strict=True):
        for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        assert state(ours.optimizer) == pytest.approx(state(theirs.optimizer), rel=1e-4)
    assert state(scripts[0].optimizer) != pytest.approx(state(scripts[1].optimizer)), "local"


def average(models: list[nn.Sequential]) -> None:
    with torch.no_grad():
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([*pair]).mean(0)
            for each in pair:
                each.copy_(mean)


def state(optimizer: torch.optim.Optimizer) -> list[float]:
    """Steps and moments, as numbers."""
    found: list[Tensor] = [x.flatten() for s in optimizer.state.values() for x in s.values()]
    numbers: list[float] = torch.cat(found).tolist()
    return numbers


def test_frozen_parameters_stay_where_they_are() -> None:
    scripts = [Script(0), Script(1)]
    before = copy.deepcopy(scripts[0].model[0].state_dict())
    lengths: list[int] = []

    def go(each: ScriptWorker) -> None:
        script = scripts[each.rank]
        loop = loop_of(each, script)
        lengths.append(len(loop._host.state.params))
        train(script, loop)

    assert workers_in_threads(2, go) == [None, None]
    assert lengths == [65, 65], "of 385"
    for script in scripts:
        for name, tensor in script.model[0].state_dict().items():
            assert torch.equal(tensor, before[name])


def test_workers_with_other_frozen_parameters_do_not_meet() -> None:
    def go(each: ScriptWorker) -> None:
        script = Script(each.rank)
        with torch.no_grad():
            script.named["0.bias"].add_(each.rank)
        train(
            script, each.training_loop(script.model, averaging(), num_samples=24, num_steps=3)
        )

    for error in workers_in_threads(2, go):
        assert isinstance(error, NetworkError)
        assert "frozen parameters" in str(error)


def test_a_step_after_the_end_is_undone() -> None:
    script = Script(0)
    loop = loop_of(ScriptWorker(), script)
    train(script, loop)
    final = copy.deepcopy(script.model.state_dict())
    script.step(0)
    assert not torch.equal(script.named["2.weight"], final["2.weight"])
    loop.step(1.0, 4)
    assert torch.equal(script.named["2.weight"], final["2.weight"])


def test_a_loop_without_losses_notices_parameters_that_are_not_finite() -> None:
    script = Script(0)
    with loop_of(ScriptWorker(), script) as loop:
        loop.step(None, 4)
        with torch.no_grad():
            script.named["2.weight"].add_(torch.inf)
        with pytest.raises(TrainingError, match="parameters became infinite"):
            loop.step(None, 4)


@thorough
@pytest.mark.filterwarnings("default")  # of the compiler's own code
def test_a_compiled_model_computes_with_what_an_exchange_has_loaded() -> None:
    scripts = [Script(0), Script(1)]
    x = torch.ones(1, 4)
    found: list[Tensor | None] = [None, None]

    def go(each: ScriptWorker) -> None:
        script = scripts[each.rank]
        compiled = cast("nn.Module", torch.compile(script.model, backend="eager"))
        compiled(x)
        loop = each.training_loop(compiled, averaging(), num_samples=24, num_steps=3)
        train(script, loop)
        found[each.rank] = compiled(x)

    assert workers_in_threads(2, go) == [None, None]
    assert found[0] is not None
    assert found[1] is not None
    torch.testing.assert_close(found[0], scripts[1].model(x))
    torch.testing.assert_close(found[0], found[1])
