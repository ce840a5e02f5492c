"""Codes that make up for each other's errors on the model's own inputs (GPTQ, arXiv 2210.17323)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_subspec.errors import UnsupportedError
from vllm_subspec.shadow.formats import ShadowSettings, check_shape, shadow_format
from vllm_subspec.shadow.linear import ShadowLinear
from vllm_subspec.shadow.packing import NativeGroups
from vllm_subspec.shadow.quantizers import symmetric_scale

_DAMPING = 0.01  # of the mean diagonal, as in the paper
_DAMPING_TRIES = 5
_ROWS = 2048  # at once, since several fp32 copies are held


@dataclass(frozen=True, eq=False)
class InputGram:
    """What is known of a linear's inputs. Make one with ``of``.

    Args:
        gram: [in, in] fp32, the sum of x x^T over the inputs x.
        factor: [in, in] fp32, upper triangular U with U^T U = the inverse of the damped gram.
    """

    gram: torch.Tensor
    factor: torch.Tensor

    @classmethod
    def of(cls, gram: torch.Tensor, name: str) -> InputGram:
        """Damp and factorise ``gram`` ([in, in] fp32, symmetric); ``name`` is for errors.

        Inputs that are never or always seen together (a gram of low rank) are fine: damping by 1 %
        of the mean diagonal makes them regular, and if that is too little, ten times as much.

        Raises:
            UnsupportedError: an input was not finite, or no damping helps.
        """
        if not torch.isfinite(gram).all():
            raise UnsupportedError(
                f"{name}: the inputs seen in calibration are not finite; check the checkpoint, or "
                "serve it without calibration"
            )
        damping = _DAMPING * float(gram.diagonal().mean()) or 1.0
        # With the inputs in reverse order, the inverse's factor is the inverse of the factor: one
        # Cholesky decomposition instead of two, and no explicit inverse.
        reverse = gram.flip(0, 1)
        diagonal = reverse.diagonal().clone()
        for _ in range(_DAMPING_TRIES):
            reverse.diagonal().copy_(diagonal + damping)
            lower, failed = torch.linalg.cholesky_ex(reverse)
            if not failed:
                unit = torch.eye(len(gram))
                inverse = torch.linalg.solve_triangular(lower, unit, upper=False)
                return cls(gram, inverse.flip(0, 1))
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
    weights that are still to come (GPTQ, its section 3.2). The error tr(E G E^T), E the change of
    the weight and G the gram, is at most that of rounding to the nearest.

    Args:
        weight: [out, in], fp32, bf16 or fp16, on the CPU; in is a multiple of ``group_size``.
        inputs: what the linear's inputs are like.
        bits: 4, 6 or 8.
        group_size: inputs that share a scale.

    Returns:
        Codes [out, in] uint8 and parts [out, in / group_size, 2 at 4 bits, else 1] fp32 with fp16
        values, as ``NativeGroups.pack`` takes them.
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
    if not isinstance(fmt, NativeGroups):
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


def _quantize_rows(
    weight: torch.Tensor, inputs: InputGram, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantize_compensated``, of few rows in fp32."""
    original = weight.T.contiguous()  # [in, out]: an input's weights lie side by side
    left, factor = original.clone(), inputs.factor
    made, nearest = (_Levels(original, bits, group_size) for _ in range(2))
    errors = torch.empty(group_size, left.shape[1])
    for start in range(0, len(left), group_size):
        stop = start + group_size
        nearest.begin(start, original[start:stop])
        nearest.round(slice(start, stop), original[start:stop])
        # Its scales are those of the weights as they are by now, and are never changed after.
        made.begin(start, left[start:stop])
        for row, error in zip(range(start, stop), errors, strict=True):
            torch.sub(left[row], made.round(row, left[row]), out=error)
            error /= factor[row, row]
            left[row + 1 : stop].addr_(factor[row, row + 1 : stop], error, alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    # Compensation has no bound of its own: what it adds may leave a group's range.
    worse = made.loss(original, inputs.gram) > nearest.loss(original, inputs.gram)
    codes = torch.where(worse, nearest.codes, made.codes)
    parts = torch.where(worse, nearest.parts, made.parts)
    return codes.T.contiguous(), parts.permute(2, 0, 1).contiguous()


class _Levels:
    """A weight's codes in the making: ``codes`` and their ``values`` [in, out], ``parts`` [group,
    part, out]."""

    def __init__(self, weight: torch.Tensor, bits: int, group_size: int) -> None:
        num_groups = len(weight) // group_size
        self.codes = torch.empty(weight.shape, dtype=torch.uint8)
        self.values = torch.empty(weight.shape)
        self.parts = torch.empty(num_groups, 2 if bits == 4 else 1, weight.shape[1])
        self._bits, self._group_size = bits, group_size

    def begin(self, start: int, group: torch.Tensor) -> None:
        """Choose the scales of the group that begins at input ``start``."""
        low, high = group.aminmax(dim=0)
        if self._bits == 4:
            scale, base = ((high - low) / 15).half().float(), low.half().float()
            parts = torch.stack([scale, base])
        else:
            scale = symmetric_scale(low, high, self._bits)
            base, parts = scale * -(2 ** (self._bits - 1)), scale[None]
        self.parts[start // self._group_size] = parts
        self._scale, self._base = scale, base
        self._inverse = torch.where(scale == 0, 0, 1 / scale)

    def round(self, inputs: int | slice, weight: torch.Tensor) -> torch.Tensor:
        """Round the weights of some of the group's inputs; returns their values."""
        codes = ((weight - self._base) * self._inverse).round_().clamp_(0, 2**self._bits - 1)
        self.codes[inputs] = codes
        self.values[inputs] = codes.mul_(self._scale).add_(self._base)
        return codes

    def loss(self, weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
        """Squared error of each output over the inputs that were seen: [out]."""
        change = self.values - weight
        return (gram @ change).mul_(change).sum(dim=0)
