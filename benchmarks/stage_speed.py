"""Are stages on several machines faster than the whole model, and decoupled than pipelined?

    sudo python -m benchmarks.stage_speed [--only same-cores uneven] [--out DIR] [--json]
    sudo python -m benchmarks.stage_speed --only same-cores --methods synthetic-gradients \\
        --balanced synthetic-gradients [--cut 4]

Eight layers learn MNIST (from $EDGEGOSSIP_DATA) in a lab, each stage on a host of its own:

- `same-cores`: hosts have the quotas with which their stages are equally busy, as trial runs
  found them, together as many cores as the one host on which the whole model is trained, by
  plain PyTorch with the best number of threads. Links are not limited.
- `uneven`: hosts have 1, 0.5, 0.5 and 0.25 parts of a core, behind 20 Mbit/s and 30 ms; the
  pipeline gets the best of several numbers of batches in flight. The same is simulated, with
  the speed of the fastest host, measured with the whole model, and nothing else.

Samples a second are those of the first stage, `SKIPPED` seconds after the start and later.
Turns alternate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import about
from lab.lab import GOODPUT, HostSpec, Lab
from lab.machine import missing

from edgegossip.data.dataset import ArraySplit
from edgegossip.data.readers import mnist
from edgegossip.recipes.staged_training import StageSettings, eight_layers
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.runner import run
from edgegossip.sim.platform import Platform
from edgegossip.training.stages.cutting import blocks
from edgegossip.training.stages.planning import measured_costs

RECIPE = "synthetic-gradients/eight-layers"
CORES = 1.6
"""All that stages use; what is left of two is the switch's and the system's."""
CUT = 2
"""The layers cost 19, 35, 15, 28 and 3 % of the time: halves, with one link in between."""
NUM_TRIALS = 3
BALANCED = "local-prediction"
FULL_SIZE = "synthetic-gradients-full-size"
METHODS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("pipelined", "greedy", BALANCED, "synthetic-gradients"), ()),
    FULL_SIZE: ("--num-hidden", "2", "--channels", "32"),
}
"""Options by method; modules of the published size have two hidden layers."""
SPEEDS = (1.0, 0.5, 0.5, 0.25)
FASTEST = 0.7
MEGABITS, LATENCY = 20.0, 0.03
IN_FLIGHT = (4, 8, 16, 32)
SKIPPED = 10.0
BATCH = 64
WIDTH = 0.5


def plain_pace(threads: int, seconds: float) -> float:
    """Train the whole model by plain PyTorch; gives samples a second."""
    torch.set_num_threads(threads)
    dataset = mnist(default_data_dir())
    split = dataset.train
    assert isinstance(split, ArraySplit)
    model = eight_layers(StageSettings(width=WIDTH)).experiments["whole"].task.model
    assert callable(model)
    module = model()
    sgd = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    num_samples, began = 0, 0.0
    for number in itertools.count():
        if number == 20:
            began = time.perf_counter()
        if began and time.perf_counter() - began > seconds:
            break
        chosen = torch.randint(len(split), (BATCH,))
        x, y = split.batch(chosen)
        loss = torch.nn.functional.cross_entropy(module(dataset.prepare(x)), y)
        sgd.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        num_samples += BATCH * bool(began)
    return num_samples / (time.perf_counter() - began)


def whole(cores: float, threads: int, seconds: float) -> float:
    """The same on a host of so many cores."""
    command = [sys.executable, "-m", "benchmarks.stage_speed", "--plain", str(threads)]
    with Lab([HostSpec(cpu=cores)]) as lab:
        child = lab.start(0, [*command, str(seconds)], output=subprocess.PIPE)
        said = child.communicate()[0].decode()
    if child.returncode:
        raise RuntimeError(f"plain training failed: {said}")
    return float(said.splitlines()[-1])


def staged(
    hosts: Sequence[HostSpec], name: str, options: Sequence[str], out: Path, seconds: float
) -> dict[str, Any]:
    """Train in stages for so long; gives the pace and each stage's share of time at work."""
    words = [*options, *METHODS[name]]
    module = [sys.executable, "-m", "edgegossip", "worker", RECIPE, *words]
    with Lab(hosts) as lab:
        endpoints = [f"tcp/{address}:7447" for address in lab.addresses]
        children = []
        for rank, endpoint in enumerate(endpoints):
            folder = out / str(rank)
            folder.mkdir(parents=True)
            others = endpoints[:rank] + endpoints[rank + 1 :]
            run_name = "synthetic-gradients" if name == FULL_SIZE else name
            place = ["--only", run_name, "--rank", str(rank), "--out", str(folder)]
            network = ["--insecure", "--listen", endpoint, "--connect", *others]
            limit = ["--meet-seconds", "300", "--max-seconds", str(seconds)]
            with (folder / "log.txt").open("wb") as log:
                command = [*module, *place, *network, *limit]
                children.append(lab.start(rank, command, output=log))
        codes = [child.wait() for child in children]
    if any(codes):
        raise RuntimeError(f"workers ended with {codes}; see {out}/*/log.txt")
    stages = [_trained(out / str(rank) / "events.jsonl", rank) for rank in range(len(hosts))]
    return paces(stages)


def _trained(events: Path, rank: int) -> list[dict[str, Any]]:
    lines = map(json.loads, events.read_text().splitlines())
    return [each for each in lines if each["type"] == "trained" and each["rank"] == rank]


def paces(stages: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Say how many samples passed a second, and which share of the time each stage worked."""
    end = min(stage[-1]["time"] for stage in stages)
    late = [[each for each in stage if SKIPPED <= each["time"] <= end] for stage in stages]
    first = late[0]
    samples = sum(each["num_samples"] for each in first[1:])
    work = [sum(each["time"] - each["start"] for each in stage[1:]) for stage in late]
    spans = [stage[-1]["time"] - stage[0]["time"] for stage in late]
    return {
        "pace": samples / spans[0],
        "working": [a / b for a, b in zip(work, spans, strict=True)],
    }


def simulated(
    name: str, settings: StageSettings, platforms: Sequence[Platform], out: Path, seconds: float
) -> dict[str, Any]:
    """The same on platforms as fast as the hosts, from which nothing else is taken."""
    experiment = eight_layers(settings).experiments[name]
    limited = replace(experiment, platforms=tuple(platforms), max_seconds=seconds)
    run(limited, out=out)
    ranks = range(len(platforms))
    return paces([_trained(out / "events.jsonl", rank) for rank in ranks])


def same_cores(
    out: Path, turns: int, seconds: float, *, methods: Sequence[str], balanced: str, cut: int
) -> dict[str, Any]:
    """As many cores for the whole model and for its stages.

    Args:
        out: Folder of the runs.
        turns: Number of turns.
        seconds: Seconds of each run, measured.
        methods: Methods to run, in `METHODS`.
        balanced: Method for which trial runs balance the quotas.
        cut: First block of the second stage.
    """
    model = eight_layers(StageSettings(width=WIDTH)).experiments["whole"].task.model
    assert callable(model)
    costs = measured_costs(blocks(model()), torch.zeros(1, 1, 28, 28), BATCH)
    work = [sum(cost.work for cost in each) for each in (costs[:cut], costs[cut:])]
    options = _options(num_stages=2, cut_at=cut, in_flight=8)
    quotas = _shared(work)
    for trial in range(NUM_TRIALS):
        hosts = [HostSpec(cpu=quota) for quota in quotas]
        busy = staged(hosts, balanced, options, out / f"trial-{trial}", SKIPPED + seconds)
        # Messages cost a host time, too, of which the costs of its layers say nothing.
        needed = _shared([a * b for a, b in zip(quotas, busy["working"], strict=True)])
        # Halfway, because the whole way leads from one side of the balance to the other.
        quotas = [(old + new) / 2 for old, new in zip(quotas, needed, strict=True)]
    hosts = [HostSpec(cpu=quota) for quota in quotas]
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for turn in range(turns):
        for threads in (1, 2):
            found[f"whole-{threads}"].append(whole(CORES, threads, seconds))
        for name in methods:
            folder = out / f"same-{name}-{turn}"
            found[name].append(staged(hosts, name, options, folder, SKIPPED + seconds))
    return {"cores": CORES, "cut": cut, "balanced": balanced, "quotas": quotas, **found}


def _shared(work: Sequence[float]) -> list[float]:
    """Share all cores out."""
    return [max(0.05, CORES * each / sum(work)) for each in work]


def uneven(out: Path, turns: int, seconds: float) -> dict[str, Any]:
    """Unequal hosts behind slow links, in the lab and simulated."""
    hosts = [
        HostSpec(cpu=FASTEST * each, bandwidth=MEGABITS * 125_000, latency=LATENCY / 2)
        for each in SPEEDS
    ]
    speed = whole(FASTEST, 1, seconds)
    settings = StageSettings(
        num_epochs=50,
        width=WIDTH,
        precision="int8",
        speeds=SPEEDS,
        throughput=speed,
        latency=LATENCY,
        bandwidth=GOODPUT * MEGABITS * 125_000,
    )
    told = {key: getattr(settings, key) for key in ("precision", "speeds", "throughput")}
    told |= {"latency": LATENCY, "bandwidth": settings.bandwidth}
    runs = [("greedy", IN_FLIGHT[-1]), *(("pipelined", each) for each in IN_FLIGHT)]
    found: dict[str, Any] = {"whole on the fastest": speed}
    for name, in_flight in runs:
        key = f"{name}-{in_flight}"
        options = _options(in_flight=in_flight, **told)
        found[key] = {
            "lab": [
                staged(hosts, name, options, out / f"{key}-{turn}", SKIPPED + seconds)
                for turn in range(turns)
            ],
            "simulated": simulated(
                name,
                replace(settings, in_flight=in_flight),
                [Platform(throughput=speed * each) for each in SPEEDS],
                out / f"{key}-simulated",
                SKIPPED + seconds,
            ),
        }
    return found


def _options(**values: Any) -> list[str]:  # noqa: ANN401
    words = ["--num-epochs", "50", "--width", str(WIDTH)]
    for name, value in values.items():
        many = value if isinstance(value, tuple) else (value,)
        words += [f"--{name.replace('_', '-')}", *map(str, many)]
    return words


PARTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "same-cores": same_cores,
    "uneven": uneven,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--methods", nargs="+", choices=[*METHODS], default=["pipelined", "greedy", BALANCED]
    )
    parser.add_argument("--balanced", choices=[*METHODS], default=BALANCED)
    parser.add_argument("--cut", type=int, default=CUT, help="first block of the second stage")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run, measured")
    parser.add_argument("--out", type=Path, default=Path(time.strftime("runs/stages/%H%M%S")))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a summary")
    parser.add_argument("--plain", nargs=2, type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        print(plain_pace(int(options.plain[0]), options.plain[1]))
        return 0
    if lacks := missing():
        print(f"no lab here, as this is missing: {'; '.join(lacks)}")
        return 0
    origin = about(options)
    own = {name: getattr(options, name) for name in ("methods", "balanced", "cut")}
    settings: Mapping[str, Mapping[str, Any]] = {"same-cores": own}
    found = {
        part: PARTS[part](options.out, options.turns, options.seconds, **settings.get(part, {}))
        for part in options.only
    }
    if options.json:
        print(json.dumps({**origin, "parts": found}, indent=1))
        return 0
    for part, runs in found.items():
        for name, values in runs.items():
            print(f"{part:12}{name:24}{_told(values)}")
    return 0


def _told(values: Any) -> str:  # noqa: ANN401
    if isinstance(values, dict):
        return f"lab {_told(values['lab'])}, simulated {_told([values['simulated']])}"
    if isinstance(values, list) and values and isinstance(values[0], dict):
        working = ", ".join(f"{each:.0%}" for each in values[0]["working"])
        middle = statistics.median(each["pace"] for each in values)
        return f"{middle:.0f} samples/s (at work: {working})"
    if isinstance(values, str):
        return values
    some = values if isinstance(values, list) else [values]
    return ", ".join(f"{each:.3g}" for each in some)


if __name__ == "__main__":
    sys.exit(main())
