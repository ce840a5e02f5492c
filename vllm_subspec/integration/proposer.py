"""The class that vLLM's ``custom_class`` method names; the runner does the drafting."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import nn
from vllm.config import VllmConfig

from vllm_subspec.errors import ConfigError
from vllm_subspec.integration.arguments import CONFIG_KEY, PROPOSER


class SubstituteProposer:
    """Stands where vLLM expects a proposer (v1/spec_decode/custom_class_proposer.py).

    Drafting needs the scheduler's output, block tables and generators, which ``propose`` does
    not get: `SubSpecRunnerMixin.propose_draft_token_ids` drafts instead.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._is_translated = CONFIG_KEY in vllm_config.additional_config

    def load_model(self, target_model: nn.Module) -> None:
        """Nothing to load: the draft is the target's own module tree."""

    @property
    def propose(self) -> Callable[..., NoReturn]:
        """Never called; the runner drafts.

        vLLM looks it up right after construction, whose own errors it would rewrite.

        Raises:
            ConfigError: SubSpec's plugin did not translate the engine's arguments.
        """
        if not self._is_translated:
            raise ConfigError(
                f"{PROPOSER}, by exactly this name, works only with the plugin 'subspec', which "
                f"is not loaded: name it in the environment variable VLLM_PLUGINS, or unset that "
                f"variable"
            )
        return _never


def _never(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError("SubSpec drafts in its runner; this worker runs another one")
