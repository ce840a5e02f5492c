"""Compiles Triton kernels to machine code for GPUs that need not be there.

Run as a process of its own, since tests import kernels for the interpreter. Reads a JSON list of
kernels from standard input, each a dictionary with

- ``kernel``: "module:function";
- ``signature``: argument name -> Triton type ("*bf16", "*i64", "i32", "i64", "fp32", ...), in the
  kernel's order; those of ``constexprs`` may be left out;
- ``constexprs``: argument name -> value;
- ``num_warps``: optional, 4 if missing.

Pointers are taken as aligned to 16 bytes, as torch allocates them. Writes a JSON list with, for
each kernel and for sm_80 and sm_90 in turn: ``kernel``, ``capability`` and the ``ptx`` that
ptxas assembled.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90)


def compile_kernel(request: dict[str, Any], capability: int) -> dict[str, Any]:
    module, name = request["kernel"].split(":")
    function = getattr(importlib.import_module(module), name)
    constexprs = request["constexprs"]
    signature = dict(request["signature"]) | dict.fromkeys(constexprs, "constexpr")
    signature = {name: signature[name] for name in function.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(function, signature, constexprs, attributes)
    options = {"num_warps": request.get("num_warps", 4)}
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options=options)
    assert kernel.asm["cubin"]
    return {"kernel": request["kernel"], "capability": capability, "ptx": kernel.asm["ptx"]}


if __name__ == "__main__":
    compiled = [compile_kernel(r, c) for r in json.load(sys.stdin) for c in CAPABILITIES]
    json.dump(compiled, sys.stdout)
