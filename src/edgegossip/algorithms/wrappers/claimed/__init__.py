"""Claimed work: the samples of an epoch, divided among the present workers by speed."""
