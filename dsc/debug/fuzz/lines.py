"""What a line may be: rows of text by kind.  A new operator is a new row.

Operands are written ``{0}``, ``{1}``, ...; ``[d]`` stands for a dimension of the first, ``[e]`` for another, ``[dims]``
for a list of one or more, ``[keep]`` for a bool.  Lines that eager refuses are thrown away, so a row need not suit
every operand.  Sizes are asked of operands, not written down, so that a line means the same for all sizes.
"""

from __future__ import annotations

FLOAT = (
    "-{0}", "{0}.abs()", "torch.sigmoid({0})", "torch.tanh({0})", "F.silu({0})", "F.gelu({0})", "F.relu({0})",
    "F.gelu({0}, approximate='tanh')", "torch.sin({0})", "torch.cos({0})", "torch.exp(-{0}.abs())", "torch.exp2(-{0}.abs())",
    "torch.erf({0})", "torch.sqrt({0}.abs() + 1)", "torch.sqrt({0}.abs())", "torch.rsqrt({0} * {0} + 1)",
    "torch.log({0}.abs() + 0.5)", "torch.log2({0}.abs() + 0.5)", "torch.log1p({0}.abs())", "torch.expm1(-{0}.abs())",
    "{0} * 0.3", "{0} + 1", "1 - {0}", "{0} - 0.7", "{0} / 3", "2 / ({0}.abs() + 1)", "{0}.reciprocal().clamp(-2, 2)",
    "{0}.pow(2)", "{0}.pow(3)", "{0}.pow(4)", "({0}.abs() + 0.1).pow(0.5)", "({0}.abs() + 0.1).pow(-0.5)",
    "({0}.abs() + 0.1).pow(-1)", "({0}.abs() + 0.1).pow(-2)", "({0}.abs() + 0.1).pow(1.7)", "1.5 ** {0}", "{0}.square()",
    "{0}.clamp(-1, 1)", "{0}.clamp(min=0.1)", "{0}.clamp(max=0.1)", "{0}.floor()", "{0}.ceil()", "{0}.trunc()",
    "{0}.round()", "{0}.sign()", "{0}.frac()", "{0}.clone()", "{0}.contiguous()", "{0}.detach()", "F.softplus({0})",
    "F.leaky_relu({0}, 0.1)", "F.elu({0})", "F.hardtanh({0})", "F.hardswish({0})", "F.hardsigmoid({0})", "F.mish({0})",
    "F.logsigmoid({0})", "F.relu6({0})", "F.threshold({0}, 0.1, 0.2)", "F.softsign({0})", "F.celu({0})", "F.selu({0})",
    "{0}.nan_to_num(0.1)", "torch.asinh({0})", "torch.sinc({0})", "torch.special.erfc({0})", "{0}.logit(0.1)",
    "aten.add.Scalar({0}, 2)", "aten.sub.Scalar({0}, 0.3)", "aten.rsub.Scalar({0}, 0.3, 2)", "aten.mul.Scalar({0}, 0.3)",
    "aten.div.Scalar({0}, 3)",
)  # fmt: skip

FLOATS_2 = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.add({0}, {1}, alpha=2)", "torch.sub({0}, {1}, alpha=0.5)", "torch.atan2({0}, {1}.abs() + 1)",
    "torch.pow({0}.abs() + 0.5, {1})", "torch.fmod({0}, {1}.abs() + 1)", "torch.remainder({0}, {1}.abs() + 1)",
    "torch.hypot({0}, {1} + 3)", "torch.copysign({0}, {1})", "torch.clamp({0}, {1}, {1} + 1)", "{0}.clamp(min={1})",
    "{0}.clamp(max={1})", "torch.logaddexp({0}, {1})", "torch.where({0} > 0, {1}, 0.5)", "{0}.detach() * {1}",
    "torch.where({0}.detach() == {0}.detach(), {1}, {0})", "F.smooth_l1_loss({0}, {1})", "F.huber_loss({0}, {1})",
    "F.mse_loss({0}, {1})", "F.mse_loss({0}, {1}, reduction='sum')", "F.mse_loss({0}, {1}, reduction='none')",
    "F.l1_loss({0}, {1})", "F.binary_cross_entropy_with_logits({0}, torch.sigmoid({1}.detach()))", "F.prelu({0}, {1})",
    "F.glu(torch.cat([{0}, {1}], -1))", "{0} * {1}.mean()", "aten.copy.default({0}, {1})", "{0}.expand_as({1})",
    "torch.where({0} < {1}, {0}, {1} * 2)", "torch.fmax({0}, {1})", "torch.heaviside({0}, {1})",
    "torch.xlogy({0}, {1}.abs() + 1)", "torch.clamp_min({0}, {1})", "torch.clamp_max({0}, {1})", "aten.silu_backward({0}.detach(), {1}.detach())",
    "{0}.type_as({1})", "{0}.reshape({1}.shape)",
)  # fmt: skip

FLOATS_3 = (
    "torch.addcmul({0}, {1}, {2}, value=0.5)", "torch.addcdiv({0}, {1}, {2}.abs() + 1, value=0.5)",
    "aten.addcdiv.default({0}, {1}, {2}.abs() + 1, value=0.5)", "torch.lerp({0}, {1}, 0.3)", "torch.lerp({0}, {1}, 0.7)", "torch.lerp({0}, {1}, {2})",
    "torch.where({0} > {1}, {2}, {0})", "torch.clamp({0}, {1}, {2})", "F.layer_norm({0}, {0}.shape[-1:], {1}, {2})",
    "F.batch_norm({0}, None, None, {1}, {2}, training=True)", "F.group_norm({0}, 1, {1}, {2})",
    "torch.addmm({0}, {1}, {2})", "torch.baddbmm({0}, {1}, {2})", "F.linear({0}, {1}, {2})",
    "F.scaled_dot_product_attention({0}, {1}, {2})",
)  # fmt: skip

TO_BOOL = (
    "{0} > 0", "{0} >= 0.3", "{0} < 1", "{0} <= 0", "{0} == 0", "{0} != 1", "{0}.isnan()", "{0}.isinf()",
    "aten.isinf.default({0})", "{0}.isfinite()", "{0}.logical_not()", "{0}.bool()", "{0}.any([d], [keep])",
    "{0}.all([d], [keep])", "{0}.any()", "{0}.all()", "torch.any({0}, [dims], [keep])", "torch.all({0}, [dims], [keep])",
)  # fmt: skip
TO_BOOL_2 = (
    "{0} > {1}", "{0} >= {1}", "{0} < {1}", "{0} <= {1}", "{0} == {1}", "{0} != {1}", "{0}.logical_and({1})",
    "{0}.logical_or({1})", "{0}.logical_xor({1})", "torch.isclose({0}, {1})",
)  # fmt: skip

BOOL = (
    "~{0}", "{0} & True", "{0}.logical_not()", "{0}.to(torch.float32)", "{0}.to(torch.int32)", "{0}.sum()", "{0}.any()",
    "{0}.all()", "{0}.sum([d])", "{0}.cumsum([d])", "{0}.clone()", "torch.where({0}, 0.5, -0.5)", "{0} * 2.5",
    "{0}.any([d], [keep])", "{0}.all([d], [keep])", "torch.any({0}, [dims])", "{0} + {0}", "{0}.flip(0)",
)  # fmt: skip
BOOL_2 = ("{0} & {1}", "{0} | {1}", "{0} ^ {1}", "{0} == {1}", "{0} != {1}", "{0} * {1}", "{0}.logical_xor({1})")

MASKED = (
    "torch.where({0}, {1}, {2})", "{1}.masked_fill({0}, -0.5)", "{1} * {0}", "torch.where({0}, {1}, 0.0)",
    "{1} + {0}", "aten.masked_fill.Tensor({1}, {0}, {2}.sum())", "aten.native_dropout_backward.default({1}.contiguous(), {0}.contiguous(), 1.25)",
    "torch.where({0}, {1}, {1} * 2)", "torch.softmax({1}.masked_fill({0}, float('-inf')), [d])",
    "{1}.masked_fill({0}, float('-inf')).amax([d])",
)  # fmt: skip

INT = (
    "-{0}", "{0} + 1", "{0} * 3", "{0} - 100", "2 - {0}", "{0} & 1", "{0} | 4", "{0} ^ 3", "{0}.clamp(0, 1)", "{0}.abs()",
    "~{0}", "{0} << 1", "{0} >> 1", "{0} // 3", "{0} % 3", "{0} // -2", "{0} % -2", "torch.div({0}, 3, rounding_mode='trunc')",
    "({0} > 0).to({0}.dtype)", "{0}.to(torch.float32)", "{0}.to(torch.float16)", "{0} / 2", "{0} * 0.5", "{0}.sum()",
    "{0}.sum([d], [keep])", "{0}.sum([d], dtype=torch.float32)", "{0}.amax([d], [keep])", "{0}.amin([dims])", "{0}.max()",
    "{0}.min()", "{0}.cumsum([d])", "{0}.prod([d])", "{0}.clamp_min(1)", "{0}.clamp_max(1)", "F.relu({0})", "{0}.sign()",
    "{0}.to(torch.int8)", "{0}.to(torch.uint8)", "{0}.to(torch.int64)", "{0}.to(torch.bool)", "{0}.argmax([d])",
    "{0}.pow(2)", "{0}.flip(0)", "{0}.sort([d]).values", "{0}.float().mean()", "{0}.bitwise_not()", "{0}.tril()",
    "{0}.logical_not()", "F.pad({0}, (1, 1), value=7)", "{0}.masked_fill({0} > 1, 9)", "torch.full_like({0}, 3) - {0}",
    "{0}.any([d])", "{0}.all([d])", "{0}.unsqueeze(0).expand(2, *{0}.shape)",
    "aten.bitwise_and.Scalar({0}, 3)", "aten.bitwise_or.Scalar({0}, 3)", "aten.bitwise_xor.Scalar({0}, 3)",
)  # fmt: skip
INT_2 = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "{0} ^ {1}", "{0} | {1}",
    "{0} & {1}", "{0} // ({1}.abs() + 1)", "{0} % ({1} * 2 + 1)", "{0} < {1}", "{0} == {1}", "{0} >> ({1} & 3)",
    "{0} << ({1} & 3)", "torch.where({0} > {1}, {0}, {1})", "torch.cat([{0}, {1}])", "torch.stack([{0}, {1}])",
    "{0}.logical_and({1})", "{0} / ({1}.abs() + 1)", "torch.fmod({0}, {1} * 2 + 1)",
)  # fmt: skip

VIEW = (
    "{0}.transpose([d], [e])", "{0}.unsqueeze([d])", "{0}.unsqueeze(-1)", "{0}.squeeze()", "{0}.squeeze([d])",
    "{0}.squeeze([dims])", "{0}.reshape(-1)", "{0}.flatten([d])", "{0}.select([d], 0)", "{0}.select([d], -1)",
    "{0}.narrow([d], 1, {0}.shape[[d]] - 1)", "{0}.narrow([d], 0, 1)", "{0}[1:]", "{0}[:-1]", "{0}[::2]", "{0}[..., 1:]",
    "{0}[..., :-1]", "{0}[..., ::2]", "{0}[:, 1:]", "{0}[..., None, :]", "{0}.movedim([d], [e])", "{0}.mT", "{0}.unbind([d])[0]",
    "{0}.unbind([d])[-1]", "{0}.split(2, [d])[0]", "{0}.split(2, [d])[-1]", "{0}.chunk(2, [d])[0]", "{0}.chunk(2, [d])[-1]",
    "{0}.chunk(3, [d])[0]", "torch.split({0}, [1, {0}.shape[[d]] - 1], [d])[1]", "{0}.tensor_split(2, [d])[1]",
    "{0}.diagonal()", "{0}.diagonal(1, [d], [e])", "{0}.unfold([d], 2, 1)", "{0}.unfold([d], 2, 2)", "{0}.expand(2, *{0}.shape)",
    "{0}.unsqueeze([d]).expand(*{0}.shape[:[d]], 3, *{0}.shape[[d]:])", "{0}.view({0}.shape)", "{0}.reshape({0}.shape[::-1])",
    "{0}.permute(-1, *range({0}.dim() - 1))", "{0}.reshape(*{0}.shape[:[d]], -1)", "{0}.unflatten([d], (1, -1))",
    "{0}.unflatten([d], (-1, 2))", "{0}.view(-1, {0}.shape[-1])", "{0}.swapaxes([d], [e])", "{0}.broadcast_to(2, *{0}.shape)",
    "{0}.as_strided({0}.shape, {0}.stride())", "{0}.reshape({0}.numel())", "{0}.view(-1, 1)",
)  # fmt: skip

REDUCE = (
    "{0}.sum()", "{0}.sum([dims], [keep])", "{0}.sum([dims], [keep])", "{0}.sum([d])", "{0}.mean()", "{0}.mean([dims], [keep])",
    "{0}.mean([d])", "{0}.amax([dims], [keep])", "{0}.amin([dims], [keep])", "{0}.max()", "{0}.min()", "{0}.max([d]).values",
    "{0}.min([d], keepdim=[keep]).values", "{0}.var([dims], correction=0, keepdim=[keep])", "{0}.var([d])", "{0}.var()",
    "{0}.std([dims], correction=0)", "{0}.var([dims], correction=0).add(0.1).sqrt()", "torch.var_mean({0}, [dims], correction=0)[0]",
    "torch.var_mean({0}, [dims])[1]", "torch.std_mean({0}, [d], correction=0)[1]", "torch.logsumexp({0}, [dims], [keep])",
    "{0}.clamp(-1.5, 1.5).prod([d], [keep])", "{0}.clamp(-1.5, 1.5).prod()", "{0}.norm()", "torch.linalg.vector_norm({0}, 2, [dims])",
    "{0}.norm(1, [d])", "{0}.sum([dims], dtype=torch.float32)", "{0}.mean([d], dtype=torch.float64)", "{0}.nansum([d])",
    "{0}.argmax([d])", "{0}.argmin()", "{0}.cumsum([d])", "{0}.clamp(-1.5, 1.5).cumprod([d])", "{0}.logcumsumexp([d])",
    "{0}.cummax([d]).values", "{0}.contiguous().median([d]).values", "{0}.sum_to_size({0}.shape[-1:])", "{0}.any([d])", "torch.trapezoid({0})",
)  # fmt: skip

ROW = (
    "torch.softmax({0}, [d])", "torch.log_softmax({0}, [d])", "F.softmin({0}, [d])", "F.layer_norm({0}, {0}.shape[[d]:])",
    "F.layer_norm({0}, {0}.shape[-1:])", "{0} * torch.rsqrt({0}.pow(2).mean([d], True) + 1e-2)", "F.normalize({0}, dim=[d])",
    "{0} - {0}.mean([d], True)", "{0} / ({0}.abs().sum([d], True) + 1)", "{0} - {0}.amax([d], True)",
    "F.batch_norm({0}, None, None, training=True)", "aten._native_batch_norm_legit_functional({0}, None, None, {0}.new_zeros({0}.shape[1:2]), {0}.new_ones({0}.shape[1:2]), True, 0.1, 1e-5)[0]",
    "F.instance_norm({0})", "F.group_norm({0}, 1)", "F.rms_norm({0}, {0}.shape[-1:])",
    "torch.softmax({0}, [d], dtype=torch.float32)", "F.log_softmax({0}, [d]).exp()", "{0} * torch.softmax({0}, [d])",
    "F.cross_entropy({0}, torch.arange({0}.shape[0]) % {0}.shape[1])",
    "F.cross_entropy({0}, torch.arange({0}.shape[0]) % {0}.shape[1], reduction='sum', ignore_index=1)",
    "F.cross_entropy({0}, torch.arange({0}.shape[0]) % {0}.shape[1], reduction='none')",
    "F.cross_entropy({0}, torch.arange({0}.shape[0]) % {0}.shape[1], label_smoothing=0.1)",
    "F.nll_loss(torch.log_softmax({0}, 1), torch.arange({0}.shape[0]) % {0}.shape[1], reduction='sum')",
    "F.kl_div({0}, torch.softmax({0}.detach() * 0.5, [d]), reduction='batchmean')",
)  # fmt: skip
ROW_2 = (
    "F.layer_norm({0}, {0}.shape[-1:], {1}, {1})", "F.layer_norm({0}, {1}.shape, {1})", "F.batch_norm({0}, None, None, {1}, {1}, training=True)",
    "F.rms_norm({0}, {1}.shape, {1})", "F.batch_norm({0}, {1}.detach() * 0, {1}.detach().abs() + 1, training=True)",
    "F.batch_norm({0}, {1}.detach() * 0, {1}.detach().abs() + 1)", "F.group_norm({0}, 1, {1})",
)  # fmt: skip

JOIN = (
    "torch.cat([{0}, {1}], [d])", "torch.cat([{1}, {0}, {0}])", "torch.stack([{0}, {1}], [d])", "torch.stack([{0}, {1}], -1)",
    "torch.cat([{0}, {1}[..., :1]], -1)", "torch.hstack([{0}, {1}])", "torch.cat([{0}, {1}.to(torch.float64)], [d])",
)  # fmt: skip

MATMUL = (
    "{0} @ {1}", "{0} @ {1}.mT", "{0}.mT @ {1}", "torch.matmul({0}, {1})", "F.linear({0}, {1})", "{0}.mv({1})",
    "torch.einsum('...i,...j->...ij', {0}, {1})", "torch.outer({0}, {1})", "F.conv1d({0}, {1})", "F.conv2d({0}, {1}, padding=1)",
    "torch.dot({0}, {1})", "torch.bmm({0}, {1})",
)  # fmt: skip

INDEX = (
    "F.embedding({1} % {0}.shape[0], {0})", "{0}[{1} % {0}.shape[0]]", "{0}.index_select([d], ({1} % {0}.shape[[d]]).reshape(-1))",
    "torch.gather({0}, [d], ({1} % {0}.shape[[d]]).expand({0}.shape))", "torch.take_along_dim({0}, {1} % {0}.shape[[d]], [d])",
    "{0}.scatter([d], ({1} % {0}.shape[[d]]).expand({0}.shape), 0.5)", "F.embedding(torch.arange(4) % {0}.shape[0], {0})",
    "{0}.scatter_add([d], ({1} % {0}.shape[[d]]).expand({0}.shape), {0})", "{0}[..., torch.arange(3) % {0}.shape[-1]]",
    "{0}.index_add(0, {1}.reshape(-1)[:1] % {0}.shape[0], {0}[:1])", "F.one_hot({1} % 3, 3)",
    "torch.index_put({0}, (({1} % {0}.shape[0]).reshape(-1),), {0}.sum(), accumulate=True)",
)  # fmt: skip

CREATE = (
    "{0} + torch.arange({0}.shape[-1])", "{0} * torch.arange(2, {0}.shape[-1] + 2)", "{0} + torch.arange({0}.shape[-1], 0, -1)",
    "torch.ones_like({0}) * {0}", "torch.zeros_like({0}) + {0}", "torch.full_like({0}, 0.3) * {0}", "{0} - torch.full({0}.shape, 2)",
    "{0} + torch.zeros({0}.shape)", "{0} * torch.ones({0}.shape[-1:])", "{0}.new_full({0}.shape[-1:], 0.7) + {0}",
    "{0}.new_zeros({0}.shape) - {0}", "{0}.new_ones({0}.shape[:1]).sum() * {0}", "torch.scalar_tensor(2.7) * {0}",
    "{0} * torch.linspace(0, 1, {0}.shape[-1])", "torch.arange({0}.shape[0])", "torch.full({0}.shape, 3)", "torch.eye({0}.shape[-1]) + {0}",
    "{0} + torch.tensor(0.3)", "{0} * torch.tensor([0.5])", "torch.where(torch.arange({0}.shape[-1]) < 2, {0}, 0)",
    "torch.where(torch.arange({0}.shape[-1]) % 2 == 0, {0}, -{0})", "{0}.new_empty({0}.shape).fill_(0.25) * {0}",
    "torch.empty_strided({0}.shape, {0}.stride(), dtype={0}.dtype).copy_({0})",
)  # fmt: skip

MOVE = (
    "{0}.tril()", "{0}.triu(1)", "{0}.tril(-1)", "{0}.flip(0)", "{0}.flip([dims])", "{0}.roll(1, [d])", "F.pad({0}, (1, 2))",
    "F.pad({0}, (0, 1, 2, 0), value=0.5)", "F.pad({0}, (-1, 1))", "{0}.repeat(2, *[1 for _ in {0}.shape])", "{0}.repeat_interleave(2, [d])",
    "{0}.sort([d]).values", "{0}.topk(1, [d]).values", "{0}.contiguous().view(-1)", "{0}.to(torch.[float])", "{0}.to(torch.[float])",
    "({0}.nan_to_num().clamp(-9, 9) * 4).to(torch.int32)", "({0}.nan_to_num().clamp(0, 9) * 4).to(torch.int64)", "{0}.diag_embed()",
    "{0}.clone(memory_format=torch.contiguous_format)", "{0}.to(memory_format=torch.channels_last)", "F.avg_pool1d({0}, 2)",
    "F.max_pool2d({0}, 2)", "F.avg_pool2d({0}, 2)", "F.interpolate({0}, scale_factor=2)", "F.adaptive_avg_pool2d({0}, 1)",
    "F.pixel_shuffle({0}, 1)", "torch.kron({0}, torch.ones(2))", "{0}.diff()", "{0}.rot90()", "{0}.tile(2)",
    "torch.take({0}, torch.arange({0}.shape[-1]))", "{0}.flatten()[: {0}.shape[-1]].flip(0)", "{0}.repeat_interleave(2, -1).flatten()[:-1].flip(0)",
    "torch.cat([{0}, {0} + 1], -1).flatten()[: 2 * {0}.shape[-1] - 1].flip(0)", "torch.cat([{0}, {0}], [d]).roll(1, [d])",
)  # fmt: skip

# a random number is drawn in the same dtype in the run in float64, or its stream would be another one
RANDOM = (
    "F.dropout({0}, 0.3)", "F.dropout({0}, 0.5)", "F.dropout({0}, 0.5, training=False)", "{0} * torch.rand({0}.shape)",
    "{0} + torch.randn({0}.shape)", "torch.rand_like({0}.detach().float()) * {0}", "{0} + torch.randint(0, 5, {0}.shape)",
    "torch.bernoulli(torch.sigmoid({0}.detach().float())) * {0}", "F.alpha_dropout({0}, 0.2)", "F.dropout1d({0}, 0.4)",
    "{0}[torch.randperm({0}.shape[0])]", "aten.native_dropout({0}, 0.4, True)[0]", "torch.softmax(F.dropout({0}, 0.2), [d])",
    "F.dropout2d({0}, 0.4)", "torch.randn({0}.shape[-1:])",
)  # fmt: skip

WRITE = (
    "{0}.add_(1)", "{0}.mul_(0.5)", "{0}.mul_(2)", "{0}.zero_()", "{0}.fill_(0.5)", "{0}.clamp_(-1, 1)", "F.relu({0}, inplace=True)",
    "{0}.neg_()", "{0}.tanh_()", "{0}.clone().t_()", "{0}.clone().unsqueeze_(0)", "{0}.mul(2).transpose_(0, -1)", "{0}.clone().squeeze_()", "{0}.select([d], 0).mul_(2)",
    "{0}.narrow([d], 0, 1).add_(1)", "{0}[1:].fill_(0.3)", "{0}[..., ::2].neg_()", "{0}.diagonal().fill_(1)", "{0}.view(-1).sub_(0.5)",
    "{0}.mT.mul_(0.5)", "{0}.masked_fill_({0} > 1, 0.25)", "F.dropout({0}, 0.3, inplace=True)", "{0}.sigmoid_()", "{0}.abs_()",
    "{0}.chunk(2, [d])[-1].mul_(3)", "{0}.unbind([d])[0].add_(2)", "{0}.flatten()[:1].zero_()", "{0}.detach().mul_(0.5)",
    "{0}.tril_()", "{0}.round_()", "F.silu({0}, inplace=True)", "F.leaky_relu({0}, 0.1, inplace=True)", "{0}.index_fill_(0, torch.arange(1), 0.5)",
)  # fmt: skip
WRITE_2 = (
    "{0}.add_({1})", "{0}.mul_({1})", "{0}.sub_({1}, alpha=2)", "{0}.copy_({1})", "{0}.addcmul_({1}, {1})", "{0}.lerp_({1}, 0.5)",
    "{0}[:1].copy_({1})", "{0}.select([d], 0).copy_({1})", "{0}[..., 0].add_({1})", "{0}.div_({1}.abs() + 1)", "{0}.masked_fill_({1} > 0, 0.5)",
    "{0}.mT.copy_({1})", "{0}.narrow([d], 0, 1).add_({1})", "{0}.index_add_(0, torch.arange(1), {1}[:1])", "{0}.maximum({1}).mul_(2)",
    "{0}.scatter_(0, torch.zeros({0}.shape, dtype=torch.int64), {1})", "{0}.view(-1).copy_({1})", "{0}.where({0} > 0, {1}).add_(1)",
)  # fmt: skip

KINDS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "float": (6, FLOAT, ("float",)),
    "floats 2": (8, FLOATS_2, ("float", "float")),
    "floats 3": (3, FLOATS_3, ("float", "like", "like")),
    "view": (8, VIEW, ("float",)),
    "view any": (2, VIEW, ("any",)),
    "reduce": (6, REDUCE, ("float",)),
    "row": (4, ROW, ("float",)),
    "row 2": (2, ROW_2, ("float", "like")),
    "to bool": (2, TO_BOOL, ("number",)),
    "to bool 2": (2, TO_BOOL_2, ("number", "number")),
    "bool": (1, BOOL, ("bool",)),
    "bool 2": (1, BOOL_2, ("bool", "bool")),
    "masked": (4, MASKED, ("bool", "float", "float")),
    "int": (3, INT, ("int",)),
    "int 2": (2, INT_2, ("int", "int")),
    "join": (2, JOIN, ("float", "same")),
    "matmul": (2, MATMUL, ("float", "like")),
    "index": (2, INDEX, ("float", "long")),
    "create": (2, CREATE, ("float",)),
    "move": (4, MOVE, ("float",)),
    "random": (1, RANDOM, ("float",)),
    "write": (3, WRITE, ("any",)),
    "write 2": (3, WRITE_2, ("any", "number")),
}
"""Kind -> its weight, its rows, and what each operand must be (see ``maker.FITS``)."""
