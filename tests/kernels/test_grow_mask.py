"""Packed ancestor masks: against sets of slots, and in Triton."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels.grow_mask import grow_mask, pack_mask, reference, unpack_mask


@pytest.fixture(autouse=True)
def _new_tensors_are_filled() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_triton(words: torch.Tensor, parents: torch.Tensor, first_slot: int) -> torch.Tensor:
    from subspec_kernels.grow_mask import triton

    found: torch.Tensor = triton.grow_mask(words, parents, first_slot)
    return found


def as_python(mask: list[bool]) -> list[int]:
    """Words by the documented bit order, as signed 64-bit integers."""
    words = []
    for start in range(0, len(mask), 64):
        value = sum(1 << j for j, seen in enumerate(mask[start : start + 64]) if seen)
        words.append(value - (1 << 64) if value >> 63 else value)
    return words


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_packing_keeps_the_documented_order(mask: list[bool]) -> None:
    words = pack_mask(torch.tensor(mask))
    assert words.dtype == torch.int64
    assert words.tolist() == as_python(mask)
    assert unpack_mask(words, len(mask)).tolist() == mask


def test_packing_takes_any_leading_shape_and_no_slots() -> None:
    mask = torch.rand(2, 3, 5, 130, generator=torch.Generator().manual_seed(0)) < 0.5
    words = pack_mask(mask)
    assert words.shape == (2, 3, 5, 3)
    assert torch.equal(unpack_mask(words, 130), mask)
    assert words[1, 2, 4].tolist() == as_python(mask[1, 2, 4].tolist())
    assert pack_mask(mask[..., :0]).shape == (2, 3, 5, 0)
    assert unpack_mask(words, 0).shape == (2, 3, 5, 0)


@pytest.mark.parametrize("function", [reference.grow_mask, by_triton], ids=["torch", "triton"])
@pytest.mark.parametrize(
    ("rows", "nodes", "words", "first_slot"),
    [
        (1, 1, 1, 0),  # a root
        (1, 7, 1, 1),
        (5, 5, 2, 60),  # across the sign bit into the next word
        (32, 32, 17, 1023),  # more words than a program takes
        (3, 4, 3, 188),  # up to the last bit of all
        (3, 1, 2, 63),  # the sign bit alone
    ],
)
def test_a_level_sees_its_parents_slots_and_its_own(
    function, rows: int, nodes: int, words: int, first_slot: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(first_slot)
    above = torch.rand(3, rows, 64 * words, generator=generator) < 0.5
    parents = torch.randint(rows, (3, nodes), generator=generator)
    found = function(pack_mask(above).to(device), parents.to(device), first_slot)
    expected = above[torch.arange(3)[:, None], parents]
    for node in range(nodes):
        expected[:, node, first_slot + node] = True
    assert torch.equal(found.cpu(), pack_mask(expected))


@pytest.mark.parametrize("function", [reference.grow_mask, by_triton], ids=["torch", "triton"])
def test_any_strides_and_no_requests(function, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-(2**63), 2**63 - 1, (3, 2, 4, 2), generator=generator, device="cpu")
    parents = torch.randint(4, (5, 2), generator=generator)
    words = wide.to(device)[..., 1].permute(1, 2, 0)
    found = function(words, parents.to(device).T, 100)
    expected = reference.grow_mask(words.cpu().contiguous(), parents.T.contiguous(), 100)
    assert torch.equal(found.cpu(), expected)
    assert function(words[:0], parents.to(device).T[:0], 100).shape == (0, 5, 3)


WORDS, PARENTS = torch.zeros(2, 3, 2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
WRONG = {
    "words are torch.int32": (WORDS.int(), PARENTS, 1),
    r"words are .* \[3, 2\]": (WORDS[0], PARENTS, 1),
    "parents are torch.int32": (WORDS, PARENTS.int(), 1),
    r"parents are .* \[1, 4\]: give int64 \[2, nodes\]": (WORDS, PARENTS[:1], 1),
    "slots 125 to 128 do not fit into 2 words.*: give 3 words": (WORDS, PARENTS, 125),
    "slots -1 to 2": (WORDS, PARENTS, -1),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused_alike(message: str) -> None:
    for function in (grow_mask, by_triton):
        with pytest.raises(ValueError, match=message):
            function(*WRONG[message])


def test_the_kernel_compiles(compile_kernels) -> None:
    kernel = dict(
        kernel="subspec_kernels.grow_mask.triton:grow_words",
        signature=dict(words="*i64", parents="*i64", out="*i64")
        | dict(first_slot="i32", nodes="i32", count="i32")
        | dict(words_request_stride="i64", words_node_stride="i32", words_word_stride="i32")
        | dict(parents_request_stride="i32", parents_node_stride="i32"),
        constexprs=dict(BLOCK=256),
    )
    chain = kernel | dict(
        constexprs=dict(BLOCK=256, nodes=1, count=1, words_word_stride=1, parents_node_stride=1)
    )
    compiled = compile_kernels([kernel, chain])
    assert all(".entry grow_words" in kernel["ptx"] for kernel in compiled)
