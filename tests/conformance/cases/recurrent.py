"""LSTM, GRU and plain recurrent layers, in the graph and beside it: outputs, states, gradients of the weights."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from conformance.case import Case, randn

TOLERANCE = (1e-4, 1e-5)


def in_the_graph() -> contextlib.AbstractContextManager[object]:
    """Dynamo breaks at recurrent layers unless it is told not to."""
    return torch._dynamo.config.patch(allow_rnn=True)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.g = nn.GRU(10, 3, batch_first=True)

    def forward(self, x: Tensor, h0: Tensor) -> Any:
        y, (h, c) = self.l(x)
        z, hn = self.g(y, h0)
        return z, h, c, hn


def stack() -> Case:
    torch.manual_seed(0)
    return Case(Stack(), [(randn(2, 3, 4, grad=True), torch.zeros(1, 2, 3))], grad=True, tol=TOLERANCE)


def lstm_and_gru() -> Case:
    """pytorch/pytorch#158007, #116858, #175830: two layers, both directions, and a GRU, traced into the graph."""
    return Case(**{**vars(stack()), "around": in_the_graph})


def lstm_and_gru_beside_the_graph() -> Case:
    """The same without being told: graph breaks."""
    return stack()


class Others(nn.Module):
    """Cells in a loop, a plain RNN with relu, an LSTM with a projection, and dropout between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gru = nn.LSTMCell(4, 5), nn.GRUCell(5, 4)
        self.plain = nn.RNN(4, 3, nonlinearity="relu")
        self.projected = nn.LSTM(3, 6, proj_size=2, num_layers=2, dropout=0.3)

    def forward(self, x: Tensor) -> Any:
        h = c = x.new_zeros(x.shape[1], 5)
        outs = []
        for t in x.unbind(0):
            h, c = self.cell(t, (h, c))
            outs.append(self.gru(h, t))
        y, _ = self.plain(torch.stack(outs))
        return self.projected(y)


def cells_and_projections() -> Case:
    torch.manual_seed(0)
    return Case(Others(), [(randn(3, 2, 4, grad=True),)], grad=True, tol=TOLERANCE, around=in_the_graph)


class Dropped(nn.Module):
    """Dropout between the layers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.g, self.r = (
            nn.LSTM(4, 6, 2, dropout=0.3),
            nn.GRU(6, 3, 2, dropout=0.2),
            nn.RNN(3, 3, 2, dropout=0.2),
        )

    def forward(self, x: Tensor) -> Any:
        return self.r(self.g(self.l(x)[0])[0])


def dropout_between_layers() -> Case:
    torch.manual_seed(0)
    return Case(
        Dropped(),
        [(randn(3, 2, 4, seed=i, grad=True),) for i in range(2)],
        grad=True,
        tol=TOLERANCE,
        around=in_the_graph,
    )


class Packed(nn.Module):
    """Sequences of several lengths, packed and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.LSTM(4, 6, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
        return nn.utils.rnn.pad_packed_sequence(self.l(packed)[0])[0]


def packed_sequences() -> Case:
    torch.manual_seed(0)
    return Case(Packed(), [(randn(3, 2, 4, grad=True),)], grad=True, tol=TOLERANCE)


CASES = (lstm_and_gru, lstm_and_gru_beside_the_graph, cells_and_projections, dropout_between_layers, packed_sequences)
