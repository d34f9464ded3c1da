"""Losses: ignored targets, smoothing, weights, every reduction, masked rows, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, rand, randn


def cross_entropy_with_ignored_rows() -> Case:
    """linkedin/Liger-Kernel#1338, pytorch/pytorch#141639: partly and fully ignored targets."""

    def fn(x: Tensor, t: Tensor, w: Tensor) -> Any:
        return (
            F.cross_entropy(x, t, ignore_index=-100), F.cross_entropy(x, t, weight=w, ignore_index=-100, label_smoothing=0.1),
            F.cross_entropy(x, t, reduction="none"), F.cross_entropy(x, t, reduction="sum", ignore_index=-100),
            F.nll_loss((x * 2).log_softmax(1), t, ignore_index=-100),
        )  # fmt: skip

    some, none = torch.tensor([1, -100, 4, -100]), torch.full((4,), -100)
    return Case(
        fn, [(randn(4, 5, grad=True), some, rand(5)), (randn(4, 5, seed=1, grad=True), none, rand(5))], grad=True
    )


def cross_entropy_shapes() -> Case:
    """Soft targets, images of classes, one sample without a batch, another ignored class, bf16 logits."""

    def fn(x: Tensor, soft: Tensor, img: Tensor, t: Tensor) -> Any:
        return (
            F.cross_entropy(x, soft), F.cross_entropy(x, soft, label_smoothing=0.2), F.cross_entropy(img, t),
            F.cross_entropy(img, t, ignore_index=1, reduction="sum"), F.cross_entropy(x[0], t[0, 0, 0]),
            F.cross_entropy(x.bfloat16().float(), t[:, 0, 0]), F.cross_entropy(x, t[:, 0, 0], reduction="none").mean(),
        )  # fmt: skip

    t = torch.arange(18).reshape(2, 3, 3) % 5
    return Case(
        fn,
        [(randn(2, 5, grad=True), randn(2, 5, seed=1).softmax(-1), randn(2, 5, 3, 3, seed=2, grad=True), t)],
        grad=True,
    )


def regression_losses() -> Case:
    """mse, l1, smooth l1, huber, with broadcasts, of every reduction, also at a difference of zero."""

    def fn(x: Tensor, y: Tensor) -> Any:
        kinds = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
        return [k(x, y, reduction=r) for k in kinds for r in ("mean", "sum", "none")]

    x = torch.tensor([[0.0, 1.0, -2.0], [0.5, 3.0, 0.0]]).requires_grad_()
    return Case(fn, [(x, torch.tensor([[0.0, 0.5, 2.0], [0.5, -3.0, 1e-3]]))], grad=True)


def losses_of_two_dtypes() -> Case:
    """Predictions and targets of other dtypes meet in the wider one."""

    def fn(x: Tensor) -> Any:
        kinds = (F.mse_loss, F.l1_loss, F.smooth_l1_loss)
        others = [x.detach().to(d) * 0.5 for d in (torch.float64, torch.float16, torch.bfloat16)]
        return [
            k(*pair, reduction=r) for k in kinds for y in others for pair in ((x, y), (y, x)) for r in ("mean", "sum")
        ]

    return Case(fn, [(randn(3, 4, grad=True),)], grad=True)


def binary_and_divergence_losses() -> Case:
    """Binary cross entropy with and without logits, KL, Poisson, Gaussian, hinge and cosine losses."""

    def fn(x: Tensor, p: Tensor, t: Tensor, w: Tensor) -> Any:
        return (
            F.binary_cross_entropy_with_logits(x, t), F.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=w),
            F.binary_cross_entropy(p, t), F.kl_div(x.log_softmax(-1), p, reduction="batchmean"), F.poisson_nll_loss(x, t),
            F.gaussian_nll_loss(x, t, p), F.hinge_embedding_loss(x, t * 2 - 1), F.soft_margin_loss(x, t * 2 - 1),
            F.cosine_embedding_loss(x, p, torch.ones(3)), F.triplet_margin_loss(x, p, t), F.margin_ranking_loss(x, p, t * 2 - 1),
        )  # fmt: skip

    arguments = (
        randn(3, 4, grad=True),
        rand(3, 4, seed=1).clamp(0.1, 0.9),
        (rand(3, 4, seed=2) > 0.5).float(),
        rand(3, 4, seed=3) + 0.1,
    )
    return Case(fn, [arguments], grad=True, tol=(1e-4, 1e-5))


def masked_mean_of_tokens() -> Case:
    """A language model's loss: shifted logits, a mask, a mean over what is left, chunks of rows."""

    def fn(h: Tensor, w: Tensor, t: Tensor) -> Any:
        logits = (h @ w.T)[:, :-1].reshape(-1, 7)
        labels = t[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
        keep = (labels != -100).float()
        parts = sum(
            F.cross_entropy(c, k, ignore_index=-100, reduction="sum") for c, k in zip(logits.chunk(3), labels.chunk(3))
        )
        return (loss * keep).sum() / keep.sum(), parts, logits.logsumexp(-1).square().mean()

    t = torch.tensor([[1, 6, -100, 0, 3], [2, -100, -100, 5, 4]])
    return Case(fn, [(randn(2, 5, 8, grad=True), randn(7, 8, seed=1, grad=True), t)], grad=True, tol=(1e-4, 1e-5))


def connectionist_temporal_classification() -> Case:
    def fn(x: Tensor, t: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), t, (6, 5), (3, 2))

    return Case(fn, [(randn(6, 2, 4, grad=True), torch.tensor([[1, 2, 3], [2, 2, 0]]))], grad=True, tol=(1e-4, 1e-5))


CASES = (
    cross_entropy_with_ignored_rows,
    cross_entropy_shapes,
    regression_losses,
    losses_of_two_dtypes,
    binary_and_divergence_losses,
    masked_mean_of_tokens,
    connectionist_temporal_classification,
)
