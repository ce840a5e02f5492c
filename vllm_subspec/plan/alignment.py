"""How far a draft agrees with its target, given the bits of each unit.

Quantisation adds noise to the logits. The noise of different units is independent, so variances
add, and a unit's variance shows as the divergence KL_u(bits) of the next-token distribution when
only that unit is low-bit. A small noise flips the argmax with a chance proportional to its
amplitude, the root of the variance. So a chain loses, per level,

    loss = -ln(chance to go one level deeper) = LOSS_PER_ROOT_KL * sqrt(sum_u KL_u) + LOSS_FLOOR

where the floor is what even the unquantised self loses (near-ties, sharpening). A tree of width k
loses loss / k ** WIDTH_POWER per level, and reaches level l with chance exp(-l * that).

The divergence must be measured as the draft sees the model: keys and values of the context are the
target's, only the token itself goes through low-bit weights. With those of the context low-bit too,
early layers seem six times as harmful as they are (SmolLM2-135M, 4 bits, first 8 of 30 layers: 15 %
of the total instead of 7 %; last 8: 26 % instead of 65 %).

Fitted to 20 acceptance lengths: 14 of SmolLM2-135M with the prior (uniform and mixed bits,
residents at either end, widths 1, 4 and 6, depths 16 to 48), and 4, 6 and 8 bits of it and of its
twin widened twice, with measured divergences. The worst is 14 % off.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from vllm_subspec import envs
from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import ConfigError
from vllm_subspec.files import atomic_replace, private_directory, read_private
from vllm_subspec.plan.values import check_keys, check_number

Values = NDArray[np.float64]

LOSS_PER_ROOT_KL = 0.61
LOSS_FLOOR = 0.0075
WIDTH_POWER = 0.473

_SAMPLE_BYTES = 1 << 16  # of weights
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

# Two more bits make a step 4 times smaller, its square 16 times. The native kernel's rounding of
# activations to 8 bits comes on top, the same at all widths (three models measured with it: 6 bits
# 0.09 to 0.13, 8 bits 0.019 to 0.033).
_PRIOR_BY_BITS = {4: 1.0, 6: 0.1, 8: 0.025}
# Of SmolLM2-135M, 4 bits, groups of 64. Its twins widened two and three times have 0.120 and 0.160,
# 40 and 62 % of it in the first half of the layers: a measurement is worth its minutes.
_PRIOR_LAYERS_KL = 0.0736  # nats, all layers together
_PRIOR_LAST_SHARE = 0.25  # of that, the last layer's own: nothing after it absorbs its noise
_PRIOR_HEAD_SHARE = 0.75  # of that, what the head adds


@dataclass(frozen=True)
class Sensitivity:
    """What each unit's quantisation does to the next-token distribution.

    Attributes:
        kl: bits -> divergence in nats of the draft from the target when only that unit is
            low-bit, one for each decoder layer, then one for the head.

    Raises:
        ConfigError: no bits, unequal lengths, or a divergence that is no number from 0 up.
    """

    kl: Mapping[int, tuple[float, ...]]

    def __post_init__(self) -> None:
        lengths = {len(values) for values in self.kl.values()}
        if len(lengths) != 1 or min(lengths) < 2:
            raise ConfigError(
                f"sensitivity has {sorted(lengths)} units by bits: give, for each number of bits, "
                "one divergence per decoder layer and one for the head"
            )
        for bits, values in self.kl.items():
            for value in values:
                check_number(Sensitivity, f"kl[{bits}]", value, low=0)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(next(iter(self.kl.values()))) - 1

    @classmethod
    def prior(cls, num_layers: int) -> Sensitivity:
        """A guess for a model that nobody measured.

        The divergence grows in proportion to a layer's depth, and the last layer stands out. That
        is one model's way: in others the first layers matter as much.
        """
        if num_layers < 1:
            raise ConfigError(f"a model of {num_layers} layers has no shadow: give 1 or more")
        depths = num_layers * (num_layers + 1) / 2  # 1 + 2 + ... over all layers
        shares = [(1 - _PRIOR_LAST_SHARE) * (n + 1) / depths for n in range(num_layers)]
        shares[-1] += _PRIOR_LAST_SHARE
        shares.append(_PRIOR_HEAD_SHARE)
        return cls(
            {
                bits: tuple(_PRIOR_LAYERS_KL * share * factor for share in shares)
                for bits, factor in _PRIOR_BY_BITS.items()
            }
        )

    def at(self, unit: int, bits: int | None) -> float:
        """Divergence of one unit; None stands for full precision. The head comes last."""
        return 0.0 if bits is None else self.kl[bits][unit]

    def level_loss(self, bits: Sequence[int | None], head_bits: int | None) -> float:
        """What a chain loses per level, given each layer's bits (None: full precision)."""
        assert len(bits) == self.num_layers, (len(bits), self.num_layers)
        units = [*bits, head_bits]
        total = sum(self.at(unit, value) for unit, value in enumerate(units))
        return LOSS_PER_ROOT_KL * math.sqrt(total) + LOSS_FLOOR

    def to_json(self) -> dict[str, Any]:
        """The divergences as a JSON object."""
        return {"kl": {str(bits): list(values) for bits, values in self.kl.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sensitivity:
        """What ``to_json`` gave (raises ConfigError where it is not that)."""
        kl = check_keys(cls, value)["kl"]
        if not isinstance(kl, Mapping) or not all(str(bits).isdecimal() for bits in kl):
            raise ConfigError(f"Sensitivity.kl is {kl!r}: give an object of bits to divergences")
        return cls({int(bits): tuple(values) for bits, values in kl.items()})

    @classmethod
    def load_for(cls, directory: Path) -> Sensitivity | None:
        """What ``store_for`` kept for this checkpoint, or None where nobody measured it.

        Args:
            directory: a Hugging Face folder.

        Raises:
            ConfigError: the folder holds no weights, or the file is damaged or not this user's.
        """
        path = _cache_file(directory)
        try:
            return cls.from_json(json.loads(read_private(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is damaged ({error}): delete it, or run `vllm-subspec sensitivity` again"
            ) from error

    def store_for(self, directory: Path) -> Path:
        """Keep it in the cache for ``load_for``, and return the file.

        Raises:
            ConfigError: the folder holds no weights.
            OSError: the cache cannot be written, or is not private.
        """
        path = _cache_file(directory)
        private_directory(path.parent)
        with atomic_replace(path) as temporary:
            temporary.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
        return path


def _cache_file(directory: Path) -> Path:
    return envs.cache_dir() / "sensitivity" / f"{checkpoint_digest(directory)}.json"


def checkpoint_digest(directory: Path) -> str:
    """Of each weight file's size, header and first weights: headers alone are alike in fine-tunes.

    Raises:
        ConfigError: there is no *.safetensors in the folder, or one cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} holds no *.safetensors: give a Hugging Face folder")
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            with path.open("rb") as file:
                length = file.read(8)
                sample = int.from_bytes(length, "little") + _SAMPLE_BYTES
                digest.update(length)
                digest.update(file.read(min(sample, _MAX_HEADER_BYTES)))
            digest.update(path.stat().st_size.to_bytes(8, "little"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error}): mend the checkpoint") from error
    return digest.hexdigest()


def width_factor(nodes: Values, depth: Values) -> Values:
    """By how much a tree of ``nodes`` over ``depth`` levels divides a chain's loss.

    A pruned tree counts by its mean width.
    """
    return np.maximum(nodes / depth, 1.0) ** WIDTH_POWER


def acceptance(loss: Values, depth: Values) -> Values:
    """Tokens per pass: the sum over levels 0 (the bonus token) to ``depth`` of exp(-l * loss).

    ``loss`` is per level and above 0; the arguments broadcast.
    """
    return np.asarray(np.expm1(-(depth + 1) * loss) / np.expm1(-loss))


def expected_tau(loss: float, shape: TreeShape) -> float:
    """Acceptance length of a tree of ``shape``, bonus token included.

    Args:
        loss: of a chain, per level, from ``Sensitivity.level_loss``.
        shape: a tree whose ``max_nodes`` is below its depth reaches no deeper than that.
    """
    depth = np.float64(min(shape.depth, shape.node_count))
    factor = width_factor(np.asarray(np.float64(shape.node_count)), np.asarray(depth))
    return float(acceptance(loss / factor, np.asarray(depth)))


def loss_of(tau: float, shape: TreeShape) -> float:
    """The loss of which ``expected_tau`` is ``tau``: its inverse, as near as there is one.

    Args:
        tau: above 0; what lies outside 1 to ``depth + 1`` is taken for the nearer end.
        shape: as there.
    """
    low, high = 1e-6, 50.0  # as good as always accepted, as good as never
    if expected_tau(low, shape) <= tau:
        return low
    if expected_tau(high, shape) >= tau:
        return high
    return float(brentq(lambda loss: expected_tau(loss, shape) - tau, low, high))
