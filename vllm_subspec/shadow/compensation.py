"""Codes that make up for each other's errors on the model's own inputs (GPTQ, arXiv 2210.17323)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from subspec_kernels import lowbit_linear

from vllm_subspec.errors import UnsupportedError
from vllm_subspec.shadow.formats import ShadowSettings, check_shape, shadow_format
from vllm_subspec.shadow.linear import ShadowLinear
from vllm_subspec.shadow.packing import BlockGroups
from vllm_subspec.shadow.quantizers import symmetric_scale

# Of the mean diagonal. The paper has 0.01 for 260,000 tokens; of the few thousand here much is
# chance, which a wide linear would learn by heart and then do worse than plain rounding elsewhere.
_DAMPING = 0.1
_DAMPING_TRIES = 4
_BLOCK = 128  # inputs after which the rest of the weight catches up
_SHRINKS = (1.0, 0.92, 0.84, 0.76, 0.68)  # of a group's range: outliers may be cut
_ROWS = 2048  # at once, since several fp32 copies are held


@dataclass(frozen=True, eq=False)
class InputGram:
    """What is known of a linear's inputs. Make one with ``of``.

    Args:
        gram: [in, in] fp32, the sum of x x^T over the inputs x.
        order: [in] int64, the inputs from the largest to the smallest: what matters most is
            rounded while most weights can still make up for it.
        factor: [in, in] fp32, upper triangular U with U^T U = the inverse of the damped gram, its
            inputs in that order.
    """

    gram: torch.Tensor
    order: torch.Tensor
    factor: torch.Tensor

    @classmethod
    def of(cls, gram: torch.Tensor, name: str) -> InputGram:
        """Damp and factorise ``gram`` ([in, in] fp32, symmetric); ``name`` is for errors.

        Inputs that are never or always seen together (a gram of low rank) are fine: damping by a
        tenth of the mean diagonal makes them regular, and if that is too little, ten times as much.

        Raises:
            UnsupportedError: an input was not finite, or no damping helps.
        """
        if not torch.isfinite(gram).all():
            raise UnsupportedError(
                f"{name}: the inputs seen in calibration are not finite; check the checkpoint, or "
                "serve it without calibration"
            )
        damping = _DAMPING * float(gram.diagonal().mean()) or 1.0
        order = gram.diagonal().argsort(descending=True, stable=True)
        # With the inputs in reverse order, the inverse's factor is the inverse of the factor: one
        # Cholesky decomposition instead of two, and no explicit inverse.
        reverse = gram[order.flip(0)[:, None], order.flip(0)]
        diagonal = reverse.diagonal().clone()
        for _ in range(_DAMPING_TRIES):
            reverse.diagonal().copy_(diagonal + damping)
            lower, failed = torch.linalg.cholesky_ex(reverse)
            if not failed:
                unit = torch.eye(len(gram))
                inverse = torch.linalg.solve_triangular(lower, unit, upper=False)
                return cls(gram, order, inverse.flip(0, 1))
            damping *= 10
        raise UnsupportedError(
            f"{name}: the {len(gram)} x {len(gram)} gram of its inputs has no Cholesky factor, "
            f"even damped by {damping / 10:.3g}; calibrate on more text, or serve without "
            "calibration"
        )


def quantize_compensated(
    weight: torch.Tensor, inputs: InputGram, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a linear so that its outputs change little, rather than its weights.

    Inputs are taken one after the other; what rounding does to the output is made up for by the
    weights that are still to come (GPTQ, its section 3). Scales are chosen before, so that the
    order of the inputs is free. An output's error, a diagonal element of E G E^T with E the change
    of the weight and G the gram, is at most that of rounding to the nearest.

    Args:
        weight: [out, in], fp32, bf16 or fp16, on the CPU; in is a multiple of ``group_size``.
        inputs: what the linear's inputs are like.
        bits: 2, 3, 4, 6 or 8.
        group_size: inputs that share a scale.

    Returns:
        Codes [out, in] uint8 and parts [out, in / group_size, part] fp32 with fp16 values, as
        ``BlockGroups.pack`` takes them.
    """
    made = [
        _quantize_rows(rows.float(), inputs, bits, group_size)
        for rows in torch.split(weight, _ROWS)
    ]
    codes, parts = (torch.cat(pieces) for pieces in zip(*made, strict=True))
    return codes, parts


def compensate_linear(
    weight: torch.Tensor, inputs: InputGram, settings: ShadowSettings, name: str
) -> ShadowLinear:
    """Make a linear's shadow by ``quantize_compensated``; ``quantize_linear`` is the plain way.

    Raises:
        UnsupportedError: there is no native kernel, it does not serve this shape, or a weight is
            not finite.
    """
    out_features, in_features = weight.shape
    check_shape(out_features, in_features, settings, name)
    fmt = shadow_format(settings.bits)
    if settings.bits == "mxfp4":
        raise UnsupportedError(f"{name}: MXFP4 shadows cannot be calibrated; set bits to 4")
    if not isinstance(fmt, BlockGroups):
        raise UnsupportedError(
            f"{name}: calibrated shadows need the native kernel; mend what `vllm-subspec doctor` "
            "says of it, or serve without calibration"
        )
    size = settings.group_size
    codes, parts = quantize_compensated(weight.detach(), inputs, settings.bits, size)
    if not torch.isfinite(parts).all():
        raise UnsupportedError(
            f"{name}: its weights are not finite, or too large for float16 scales; check the "
            "checkpoint, or keep this layer resident"
        )
    return ShadowLinear(settings, fmt, *fmt.pack(codes, parts))


@dataclass(frozen=True, eq=False)
class _Grid:
    """Levels of groups: ``scale`` and ``base`` [..., groups, 1, out], value = code * scale + base,
    code in [0, top]."""

    scale: torch.Tensor
    base: torch.Tensor
    top: int

    @classmethod
    def of(cls, low: torch.Tensor, high: torch.Tensor, bits: int) -> _Grid:
        """The native format's levels for groups with these extremes."""
        if lowbit_linear.has_offset(bits):
            top = 2**bits - 1
            return cls(((high - low) / top).half().float(), low.half().float(), top)
        scale = symmetric_scale(low, high, bits)
        return cls(scale, scale * -(2 ** (bits - 1)), 2**bits - 1)

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest codes, fp32."""
        inverse = torch.where(self.scale == 0, 0, 1 / self.scale)
        return (weight - self.base).mul_(inverse).round_().clamp_(0, self.top)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes stand for."""
        return codes * self.scale + self.base

    def group(self, index: int) -> _Grid:
        """Of one group."""
        return _Grid(self.scale[index], self.base[index], self.top)

    def where(self, better: torch.Tensor, other: _Grid) -> _Grid:
        """The other's levels where ``better``."""
        scale = torch.where(better, other.scale, self.scale)
        return _Grid(scale, torch.where(better, other.base, self.base), self.top)


def _best_grid(groups: torch.Tensor, importance: torch.Tensor, bits: int) -> _Grid:
    """Of ``groups`` [groups, size, out], the levels that round them with the least squared error,
    weighted by ``importance`` [groups, size, 1]."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    best, least = _Grid.of(low, high, bits), torch.tensor(torch.inf)
    for shrink in _SHRINKS:
        grid = _Grid.of(low * shrink, high * shrink, bits)
        change = grid.values(grid.codes(groups)).sub_(groups)
        loss = change.square_().mul_(importance).sum(dim=1, keepdim=True)
        best = best.where(loss < least, grid)
        least = torch.minimum(least, loss)
    return best


def _quantize_rows(
    weight: torch.Tensor, inputs: InputGram, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantize_compensated``, of few rows in fp32."""
    original = weight.T.contiguous()  # [in, out]: an input's weights lie side by side
    groups = original.view(-1, group_size, original.shape[1])
    # What an error costs that the inputs after it make up for as well as they can.
    importance = torch.empty(len(original))
    importance[inputs.order] = inputs.factor.diagonal() ** -2
    grid = _best_grid(groups, importance.view(-1, group_size, 1), bits)
    codes = _compensate(original, grid, inputs, group_size)
    plain = _Grid.of(*groups.aminmax(dim=1, keepdim=True), bits)
    plain_codes = plain.codes(groups)
    # Compensation has no bound of its own: what it adds may leave a group's range.
    worse = _loss(grid.values(codes.view_as(groups)) - groups, inputs.gram) > _loss(
        plain.values(plain_codes) - groups, inputs.gram
    )
    grid = grid.where(worse, plain)
    codes = torch.where(worse, plain_codes.view_as(codes), codes).to(torch.uint8)
    has_offset = lowbit_linear.has_offset(bits)
    parts = torch.cat([grid.scale, grid.base], dim=1) if has_offset else grid.scale
    return codes.T.contiguous(), parts.permute(2, 0, 1).contiguous()


def _compensate(
    original: torch.Tensor, grid: _Grid, inputs: InputGram, group_size: int
) -> torch.Tensor:
    """Codes [in, out], fp32, of the weight ``original`` [in, out]."""
    order, factor = inputs.order.tolist(), inputs.factor
    left, codes = original[inputs.order], torch.empty_like(original)
    errors = torch.empty(_BLOCK, original.shape[1])
    grids = [grid.group(index) for index in range(len(original) // group_size)]
    for start in range(0, len(order), _BLOCK):
        stop = min(start + _BLOCK, len(order))
        for row, error in zip(range(start, stop), errors, strict=False):
            of_group = grids[order[row] // group_size]
            code = of_group.codes(left[row])[0]
            codes[order[row]] = code
            torch.sub(left[row], of_group.values(code)[0], out=error)
            error /= factor[row, row]
            left[row + 1 : stop].addr_(factor[row, row + 1 : stop], error, alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].T, errors[: stop - start], alpha=-1)
    return codes


def _loss(change: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Squared error [out] of each output over the inputs that were seen."""
    change = change.flatten(0, 1)
    return (gram @ change).mul_(change).sum(dim=0)
