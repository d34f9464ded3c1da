"""Pipelines over many cards: plans made on one machine, stages run by torch.distributed."""
