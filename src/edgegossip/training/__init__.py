"""Training: what a task is, and how a worker takes its steps.

A batch passes these rooms:

1. `data.dataset`: a `Split` holds the samples, and reads some batches ahead.
2. `data.partition`: a `Partition` divides the samples among workers.
3. `task`: a `Workload` gives each worker's trainer its `WorkerData`.
4. `learner`: a `Learner` cuts a request into batches and prepares each for the model.
5. `sampling.batches`: a `BatchStream` makes endless passes, and knows what they cost.
6. `sampling.sampler`: an `AccuracyAwareSampler` gives positions and weights for a pass.
7. `sampling.selection`: a `Selection` chooses them.
8. `step`: a `Step` computes the loss, differentiates it, and updates the model.

Nothing calls back: before a pass, the stream asks for the losses of some points with a `Probe`,
and after a step the learner passes the losses of samples to the sampler's `record`.
"""
