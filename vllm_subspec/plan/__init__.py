"""Which layer is kept, which is streamed, and with how many slots."""

from vllm_subspec.plan.placement import Placement, place

__all__ = ["Placement", "place"]
