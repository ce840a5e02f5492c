"""The class that vLLM's ``custom_class`` method names; the runner does the drafting."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.config import VllmConfig

from vllm_subspec.errors import ConfigError
from vllm_subspec.integration.arguments import CONFIG_KEY


class SubstituteProposer:
    """Stands where vLLM expects a proposer (v1/spec_decode/custom_class_proposer.py).

    Drafting needs the scheduler's output, block tables and generators, which ``propose`` does
    not get: `SubSpecRunnerMixin.propose_draft_token_ids` drafts instead.

    Raises:
        ConfigError: SubSpec's plugin did not translate the engine's arguments.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        if CONFIG_KEY not in vllm_config.additional_config:
            raise ConfigError(
                "vllm_subspec.SubstituteProposer works only with the plugin 'subspec': allow it "
                "in VLLM_PLUGINS, or unset that variable"
            )

    def load_model(self, target_model: nn.Module) -> None:
        """Nothing to load: the draft is the target's own module tree."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Never called; the runner drafts."""
        raise RuntimeError("SubSpec drafts in its runner; this worker runs another one")
