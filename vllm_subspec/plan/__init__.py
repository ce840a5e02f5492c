"""A memory budget and a machine in, a placement of the model in it out."""

from vllm_subspec.plan.alignment import Sensitivity, expected_tau
from vllm_subspec.plan.budget import device_memory_bytes, parse_budget
from vllm_subspec.plan.machine import MachineFigures
from vllm_subspec.plan.placement import MemoryItem, Placement, Prediction, place
from vllm_subspec.plan.planner import plan
from vllm_subspec.plan.shapes import ModelShape, Unit

__all__ = [
    "MachineFigures",
    "MemoryItem",
    "ModelShape",
    "Placement",
    "Prediction",
    "Sensitivity",
    "Unit",
    "device_memory_bytes",
    "expected_tau",
    "parse_budget",
    "place",
    "plan",
]
