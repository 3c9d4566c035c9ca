"""The environments: published machines, links and failures, with the same systems in each."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tiers import thorough

from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.server.async_local_sgd import AsyncLocalSGD
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.cli import commands
from edgegossip.cli.main import main
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.recipes.call import RecipeCall
from edgegossip.recipes.environment_tasks import ByAuthor
from edgegossip.recipes.environments import (
    HALOS_SPEEDS,
    EnvironmentSettings,
    churn,
    halos,
    one_slow,
    own_machines,
    phones,
    stragglers,
)
from edgegossip.recipes.push_sum_comparison import layer_sizes
from edgegossip.recipes.systems import SYSTEMS, Crew
from edgegossip.runs.experiment import Comparison, throughput_bound
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Recover

SMALL = EnvironmentSettings(task="digits", num_epochs=1, num_workers=4, num_evaluations=2)


@pytest.mark.parametrize(("throughput", "batch_size"), [(1000.0, 16), (50.0, 4)])
def test_halos_keeps_the_published_ratio_of_communication_to_computation(
    throughput: float, batch_size: int
) -> None:
    settings = replace(SMALL, num_workers=16, throughput=throughput, batch_size=batch_size)
    experiment = halos(settings).experiments["diloco"]
    step = batch_size / throughput
    # From region 1 to region 3, Pythia-70M takes 281.7 MB x 8 / 0.117 Gbit/s; a step 238 ms.
    published = 281.7e6 * 8 / 0.117e9 / 0.238391
    link = experiment.links.link(1, 3)
    assert 4 * sum(layer_sizes(experiment.task)) / link.bandwidth / step == pytest.approx(
        published
    )
    assert experiment.links.link(3, 1) == link
    assert experiment.links.link(0, 4).bandwidth > 100 * link.bandwidth  # within a region


def test_halos_has_the_published_speeds_of_which_the_highest_is_one() -> None:
    experiment = halos(replace(SMALL, num_workers=16)).experiments["diloco"]
    found = [each.throughput / 1000.0 for each in experiment.platforms]
    published = [speed / 0.907 for row in HALOS_SPEEDS for speed in row]
    assert sorted(found) == pytest.approx(sorted(published))
    assert found[4] == pytest.approx(1.0)  # the second worker of region 0
    assert throughput_bound(experiment.platforms) == pytest.approx(5.245, abs=1e-3)


def test_a_server_is_another_machine_beside_the_first() -> None:
    experiments = halos(replace(SMALL, num_workers=8)).experiments
    peers, served = experiments["diloco"], experiments["adsp"]
    assert served.platforms[1:] == peers.platforms
    for one in range(8):
        for other in range(8):
            if one != other:
                assert served.links.link(1 + one, 1 + other) == peers.links.link(one, other)
        if one:
            assert served.links.link(0, 1 + one) == peers.links.link(0, one)
    assert served.links.link(0, 1) == peers.links.default


@thorough
def test_without_a_spare_server_all_systems_have_the_same_machines() -> None:
    experiments = own_machines(SMALL).experiments
    assert {*SYSTEMS} - {*experiments} == {"alone", "halos"}
    assert {each.platforms for each in experiments.values()} == {
        experiments["diloco"].platforms
    }
    assert len(experiments["diloco"].platforms) == 4
    assert experiments["adsp"].roles == ["server", *["worker"] * 3]
    assert experiments["diloco"].roles == ["worker"] * 4
    assert {*own_machines(SMALL).tunable} == {*experiments}
    with pytest.raises(ValueError, match="num_workers must be at least 3"):
        own_machines(replace(SMALL, num_workers=2))


def test_each_region_has_a_server_on_its_fast_links() -> None:
    experiments = halos(replace(SMALL, num_workers=6)).experiments
    peers, served = experiments["diloco"], experiments["halos"]
    assert isinstance(served.algorithm, HALoS)
    assert served.algorithm.regions == (0, 1, 2, 3, 0, 1)
    assert served.platforms[5:] == peers.platforms
    fast = peers.links.default
    for region in range(4):
        for rank in served.algorithm.members(region)[1:]:
            assert served.links.link(1 + region, rank) == fast
    assert served.links.link(0, 1) == fast  # the global server is in the first region
    for one, other in [(0, 1), (1, 3), (2, 3)]:
        assert served.links.link(1 + one, 1 + other) == peers.links.link(one, other) != fast
    # Without regions, there is one.
    simple = one_slow(replace(SMALL, num_workers=3), slow=0.5).experiments["halos"]
    assert isinstance(simple.algorithm, HALoS)
    assert simple.algorithm.regions == (0, 0, 0)
    assert len(simple.platforms) == 5


def test_alone_trains_on_the_fastest_machine_with_all_data() -> None:
    alone = one_slow(replace(SMALL, num_workers=3), slow=0.5).experiments["alone"]
    assert [each.throughput for each in alone.platforms] == [1000.0]
    (shard,) = alone.workload().shards.values()
    assert len(shard) == len(alone.task.dataset.train)
    assert alone.algorithm == DoubleSqueeze(
        topology=complete(1), num_rounds=alone.algorithm.traits.num_rounds or 0, local_steps=16
    )


def test_half_of_the_workers_are_stragglers_in_communication() -> None:
    experiment = stragglers(SMALL).experiments["gosgd"]
    links = [(each.uplink * 8 / 1e6, each.downlink * 8 / 1e6) for each in experiment.platforms]
    assert links == [(60.0, 60.0)] * 2 + [(12.0, 12.0)] * 2
    assert len({each.throughput for each in experiment.platforms}) == 1
    server, *_ = stragglers(SMALL).experiments["adsp"].platforms
    assert server.uplink * 8 / 1e6 == 60.0


def failures(comparison: Comparison, run: str) -> list[tuple[int, float]]:
    script = comparison.experiments[run].faults.script
    return [(each.rank, each.at) for each in script if isinstance(each, Crash)]


def test_workers_fail_twice_on_average_and_all_systems_see_the_same_failures() -> None:
    comparison = churn(replace(SMALL, num_workers=60))
    found = failures(comparison, "all-reduce")
    assert len(found) == pytest.approx(120, abs=3 * math.sqrt(120))
    assert failures(comparison, "adsp") == [(rank + 1, at) for rank, at in found]
    assert failures(comparison, "alone") == [each for each in found if each[0] == 0]
    assert failures(churn(replace(SMALL, num_workers=60, seed=1)), "gosgd") != found
    experiment = comparison.experiments["gosgd"]
    away = [
        back.at - crash.at
        for crash, back in zip(
            experiment.faults.script[::2], experiment.faults.script[1::2], strict=True
        )
        if isinstance(crash, Crash) and isinstance(back, Recover)
    ]
    assert len(away) == len(found)
    mean = sum(away) / len(away) / (experiment.max_seconds or 0)
    assert mean == pytest.approx(0.01, rel=0.3)


def test_phones_have_the_speeds_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "phones.json"
    path.write_text(
        json.dumps(
            [{"Model": name, "CPU_F_AI_Score": 10 * (1 + k)} for k, name in enumerate("ab")]
        )
    )
    platforms = phones(SMALL, phone_trace=path).experiments["gosgd"].platforms
    assert {each.name for each in platforms} <= {"a", "b"}
    assert max(each.throughput for each in platforms) == 1000.0


def test_one_slow_machine_bounds_a_barrier() -> None:
    platforms = one_slow(SMALL).experiments["gosgd"].platforms
    assert [each.throughput for each in platforms] == [1000.0, 1000.0, 1000.0, 100.0]
    assert throughput_bound(platforms) == 7.75


def test_machines_can_drift_and_have_loads() -> None:
    plain = one_slow(SMALL).experiments["gosgd"].platforms
    busy = one_slow(replace(SMALL, drift=3.0, loads=True)).experiments["gosgd"].platforms
    assert not any(each.trace or each.throttling for each in plain)
    slow_downs = [each.throttling.slow_downs for each in busy if each.throttling]
    assert len({*slow_downs}) == len({each.trace for each in busy}) == len(busy)
    assert 1 <= min(map(min, slow_downs)) < max(map(max, slow_downs)) <= 3


def test_all_systems_have_the_momentum_of_the_settings() -> None:
    found = one_slow(replace(SMALL, momentum=0.9)).experiments
    assert {getattr(each.task.optimizer, "momentum", None) for each in found.values()} == {0.9}


def test_async_local_sgd_has_the_settings_of_halos_authors() -> None:
    algorithm = halos(replace(SMALL, num_workers=16)).experiments["async-local-sgd"].algorithm
    assert isinstance(algorithm, AsyncLocalSGD)
    # Each commit moves the model by 0.05 of itself at once.
    assert algorithm.outer_lr / algorithm.num_workers == pytest.approx(0.05)
    assert (algorithm.outer_momentum, algorithm.buffer_size) == (0.9, 32)


def test_a_run_lasts_as_long_as_the_machines_would_need_without_waiting() -> None:
    experiment = one_slow(replace(SMALL, num_epochs=2.5)).experiments["gosgd"]
    total = sum(each.throughput for each in experiment.platforms)
    samples = 2.5 * len(experiment.task.dataset.train)
    assert experiment.max_seconds == pytest.approx(samples / total, rel=0.01)
    assert one_slow(replace(SMALL, seconds=7.0)).experiments["adsp"].max_seconds == 7.0


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_three_values_to_try_by_an_argument_of_the_recipe(name: str) -> None:
    system = SYSTEMS[name]
    assert len({*system.values}) == 3
    crew = Crew(num_workers=3, seconds=10.0, layer_sizes=(64,))
    assert system.build(crew) == system.build(crew, system.values[0])
    assert system.build(crew, system.values[1]) != system.build(crew)
    call = RecipeCall("environments/one-slow", {"task": "digits", "num_workers": 3})
    comparison = call.make()
    assert isinstance(comparison, Comparison)
    tunable = comparison.tunable[name]
    assert tunable[system.setting] == system.values
    assert tunable["lr"] == (0.1, 0.3, 0.0333)
    values = {system.setting: system.values[2], "lr": 0.3}
    changed = call.replace(**values).experiment(name)
    sizes = layer_sizes(changed.task)
    crew = Crew(num_workers=3, seconds=changed.max_seconds or 0, layer_sizes=sizes)
    if system.machines == "the fastest":
        crew = replace(crew, num_workers=1)
    assert changed.algorithm == system.build(crew, system.values[2])
    assert getattr(changed.task.optimizer, "lr", None) == 0.3


@thorough
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_runs_in_churn_to_the_end(name: str, tmp_path: Path) -> None:
    settings = replace(SMALL, num_epochs=15, loads=True, drift=2.0)
    results = run(churn(settings).experiments[name], out=tmp_path, num_threads=0)
    assert results.reason == "time limit"
    use = results.history[-1].use
    assert use is not None
    assert 0 <= use.goodput <= use.compute_used <= 1 + 1e-9
    assert results.history[-1].samples_processed > 0


def test_authors_in_turn_fill_equal_shards() -> None:
    split = ArraySplit(torch.zeros(10, 2), torch.zeros(10, dtype=torch.int64))
    subjects = torch.tensor([1, 0, 1, 1, 0, 2, 1, 1, 1, 0])
    dataset = Dataset("text", split, split, subjects=subjects)
    shards = [each.tolist() for each in ByAuthor()(dataset, 4, seed=0)]
    assert shards == [[1, 4, 9], [0, 2, 3], [6, 7], [5, 8]]
    with pytest.raises(ValueError, match="'text' has no subjects; use IID or Dirichlet"):
        ByAuthor()(replace(dataset, subjects=None), 2, seed=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"drift": 0.5}, "drift must be at least 1"),
        ({"task": "imagenet"}, "'imagenet'"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"momentum": 0.9, "task": "gpt-books"}, "momentum must be 0 for gpt-books"),
        ({"num_layers": 2, "task": "har"}, "num_layers must be None for har, which has no GPT"),
        ({"validation_share": 0.0}, r"validation_share must be in \(0, 1\)"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EnvironmentSettings(**settings)  # type: ignore[arg-type]


def test_only_sixteen_workers_are_published() -> None:
    with pytest.raises(ValueError, match=r"num_workers must be in \[1, 16\], got 17"):
        halos(replace(SMALL, num_workers=17))


@thorough
def test_a_gpt_on_tiny_books_is_trained_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "write_report", lambda folder: folder / "report.html")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for author in "ab":
        (tmp_path / "books" / f"{author}.txt").write_text(f"{author} and so on. " * 900)
    words = ["environments/halos", "--only", "gosgd", "--task", "gpt-books-by-author"]
    words += ["--num-workers", "3", "--width", "8", "--num-layers", "1", "--num-epochs", "0.5"]
    words += ["--num-evaluations", "1", "--data-dir", str(tmp_path), "--out", "out"]
    assert main(["run", *words]) == 0
    said = capsys.readouterr().out
    assert "bits per character" in said
    assert "goodput" in said


def test_machines_of_a_spot_trace_come_and_go_in_churn(tmp_path: Path) -> None:
    path = tmp_path / "spot.json"
    series = {"metadata": {"gap_seconds": 3600}, "data": [2, 0, 3, 3, 1, 4]}
    path.write_text(json.dumps({"a": series}))
    comparison = churn(SMALL, availability=path, hours=6.0)
    for name in ("gosgd", "adsp"):
        experiment = comparison.experiments[name]
        moved = int(name == "adsp")  # a server does not fail
        assert experiment.faults.absent >= {2 + moved, 3 + moved}
        results = run(experiment, out=tmp_path / name, num_threads=0)
        assert results.reason == "time limit"
        assert results.history[-1].samples_processed > 0
