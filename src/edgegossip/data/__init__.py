"""Data: splits of samples, readers of files, and the division of samples among workers.

A split has its samples in arrays (`ArraySplit`), in any map-style data set of PyTorch
(`TorchSplit`), or among the samples of other splits (`JoinedSplit`).
"""
