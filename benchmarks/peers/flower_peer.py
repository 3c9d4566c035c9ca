"""One turn of Flower's simulation engine on Ray; runs in an environment that has it.

FedAvg of all clients, one local epoch a round, two clients at once on one core each. Rounds are
timed in the server from the second on: the first starts the actors and reads the data. Nothing
is evaluated.
"""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict
from typing import Any

# Read by Flower and Ray at their import.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

from benchmarks.peers.flower_client import app as client_app
from benchmarks.peers.same_task import Job, StopWatch, job_from_command_line, make_model, report
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

NUM_CORES = len(os.sched_getaffinity(0))


class TimedFedAvg(FedAvg):  # type: ignore[misc]
    """Times the rounds but the first."""

    def __init__(self, last_round: int, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(**settings)
        self.last_round = last_round
        self.watch: StopWatch | None = None
        self.num_rounds = 0
        self.loss = math.nan

    def configure_train(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        self.num_rounds += 1
        if self.num_rounds == 2:
            self.watch = StopWatch()
        return super().configure_train(*given, **named)

    def aggregate_train(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        arrays, metrics = super().aggregate_train(*given, **named)
        if self.watch is not None and self.num_rounds == self.last_round:
            self.watch.stop()
            self.loss = metrics["loss"]
        return arrays, metrics


def serve(job: Job, strategy: TimedFedAvg) -> ServerApp:
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(make_model(job).state_dict()),
            num_rounds=job.rounds + 1,
            train_config=ConfigRecord({"job": json.dumps(asdict(job))}),
        )

    return app


def main() -> None:
    job = job_from_command_line()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    strategy = TimedFedAvg(
        last_round=job.rounds + 1,
        fraction_evaluate=0.0,
        min_train_nodes=job.workers,
        min_available_nodes=job.workers,
    )
    run_simulation(
        server_app=serve(job, strategy),
        client_app=client_app,
        num_supernodes=job.workers,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": NUM_CORES, "include_dashboard": False},
        },
    )
    if strategy.watch is None or math.isnan(strategy.loss):
        raise SystemExit("Flower ended before its last round; its log above says why")
    report(job, strategy.watch, strategy.loss)


if __name__ == "__main__":
    main()
