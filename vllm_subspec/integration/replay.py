"""What a loaded engine makes of texts that are already written: its drafts along them (see
``draft.replay``), and what target and shadow alone say of each next token.

Mixed into a worker by vLLM's ``--worker-extension-cls``, as ``sensitivity`` is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from vllm_subspec.draft.growth import Growth
from vllm_subspec.draft.replay import Pass, replay
from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import ConfigError
from vllm_subspec.integration.calibration import _attend
from vllm_subspec.integration.drafter import DraftRequest
from vllm_subspec.integration.sensitivity import _forwarding
from vllm_subspec.shadow import ShadowLinear

Text = tuple[list[int], int]
"""Token ids of prompt and answer, and how many of them are the prompt."""


class ReplayExtension:
    """RPCs of a worker that replays; between its steps, while the requests are in its batch."""

    model_runner: Any

    def subspec_replay(
        self, texts: Sequence[Text], width: int, draft_temperature: float, depths: Sequence[int]
    ) -> list[list[list[Pass]]]:
        """The passes that trees of each depth would have taken over each text.

        Args:
            texts: whole prompts of requests that run now, so that their keys and values are there.
                Temperature and seed are the requests' own.
            width: of the trees.
            draft_temperature: sharpening T_d.
            depths: of the trees.

        Returns:
            By text and depth.

        Raises:
            ConfigError: no running request has one of ``texts`` as its prompt.
        """
        replayer = _Replayer(self.model_runner, width, draft_temperature, max(depths))
        return [replayer.passes(text, depths) for text in texts]

    @torch.inference_mode()
    def subspec_score(
        self, sequences: Sequence[list[int]], alone: bool
    ) -> list[tuple[list[float], list[int]]]:
        """What the model says of each next token, keys and values being its own.

        Args:
            sequences: token ids.
            alone: by the shadow, as if it were served alone; otherwise by the target.

        Returns:
            For each sequence, one shorter than that: negative log-likelihoods of its next tokens
            in nats, and the most probable next tokens.
        """
        _unpack(self.model_runner.model)
        return [_score(self.model_runner, sequence, alone) for sequence in sequences]

    @torch.inference_mode()
    def subspec_alone_step_s(self, text: Text) -> float:
        """Seconds a token takes the shadow alone: draft steps of a chain, as long as the answer."""
        tokens, num_prompt = text
        num_steps = len(tokens) - num_prompt
        growth = _Replayer(self.model_runner, 1, 1.0, num_steps).growth(text, 0)
        growth.step()
        began = time.perf_counter()
        for _ in range(num_steps - 1):
            growth.step()
        return (time.perf_counter() - began) / (num_steps - 1)


def _score(runner: Any, tokens: list[int], alone: bool) -> tuple[list[float], list[int]]:
    view = runner.offloader.view
    ids = torch.tensor(tokens)
    with ExitStack() as undo:
        for layer in get_layers_from_vllm_config(runner.vllm_config, Attention).values():
            attend = partial(_attend, layer.impl, [len(tokens)])
            undo.enter_context(_forwarding(layer, attend))
        undo.enter_context(set_forward_context({}, runner.vllm_config, num_tokens=len(tokens)))
        if alone:
            undo.enter_context(view.draft())
        hidden = runner.model(input_ids=ids, positions=torch.arange(len(tokens)))
        logits = runner.model.compute_logits(hidden[:-1]).float()
    surprise = F.cross_entropy(logits, ids[1:], reduction="none")
    return surprise.tolist(), logits.argmax(-1).tolist()


class _Replayer:
    def __init__(self, runner: Any, width: int, draft_temperature: float, depth: int) -> None:
        self._runner = runner
        self._depth = depth
        self._drafter = runner.speculation.drafter
        policy = replace(
            self._drafter.policy,
            shape=TreeShape(width, depth),
            draft_temperature=draft_temperature,
            noise_coupling=True,
            post_speculation=False,
            most_depth=None,
        )
        self._drafter.set_policy(policy)
        _unpack(runner.model)

    @torch.inference_mode()
    def passes(self, text: Text, depths: Sequence[int]) -> list[list[Pass]]:
        """Of one text, by depth."""
        tokens, num_prompt = text
        return replay(tokens[num_prompt:], depths, lambda root: self.growth(text, root))

    def growth(self, text: Text, root: int) -> Growth:
        """A tree without levels below token ``root`` of the answer."""
        tokens, num_prompt = text
        batch, requests = self._runner.input_batch, self._runner.requests
        states = [requests[req_id] for req_id in batch.req_ids]
        rows = [row for row, state in enumerate(states) if state.prompt_token_ids == tokens]
        if not rows:
            raise ConfigError(f"no running request has this prompt of {len(tokens)} tokens")
        row = rows[0]
        params = [state.sampling_params for state in states]
        request = DraftRequest(
            req_id=states[row].req_id,
            batch_row=row,
            committed=[tokens[num_prompt + root]],
            num_context=num_prompt + root,
            max_depth=self._depth,
            depth_cap=None,
            tokens=np.asarray(tokens, np.int32),
            output=tokens[num_prompt : num_prompt + root + 1],
            generator=self._generator(params[row], root + 1),
            block_tables=[table.block_table.gpu[row] for table in batch.block_table.block_tables],
        )
        return self._drafter.growth([request], batch.sampling_metadata, params, self._depth)

    def _generator(self, params: Any, num_drawn: int) -> torch.Generator | None:
        """What the request would draw from after so many tokens; ``None`` if it is greedy."""
        if params.temperature == 0:
            return None
        generator = torch.Generator().manual_seed(params.seed)
        self._runner.rejection_sampler.noise.advance(generator, num_drawn)
        return generator


class _Unpacked:
    """A shadow without a kernel, its weight unpacked once instead of at each use."""

    def __init__(self, shadow: ShadowLinear, dtype: torch.dtype) -> None:
        self._weight = shadow.dequantize().to(dtype)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self._weight, bias)


def _unpack(model: torch.nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        shadow = getattr(method, "shadow", None)
        if isinstance(shadow, ShadowLinear) and not shadow.format.has_kernel:
            method.shadow = _Unpacked(shadow, dtype)
