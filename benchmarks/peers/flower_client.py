"""Flower's client: one epoch from the server's parameters. Ray's actors import it."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from benchmarks.peers.same_task import LEARNING_RATE, MOMENTUM, Job, make_model, shard
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    job = Job(**json.loads(message.content["config"]["job"]))
    model = make_model(job)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = shard(job, int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for batch in torch.split(torch.randperm(len(x)), job.batch_size):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    metrics = MetricRecord({"loss": loss.item(), "num-examples": len(x)})
    records = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(content=RecordDict(records), reply_to=message)
