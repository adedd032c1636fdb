"""Zaya: an MLP as router, whose last row skips the experts; its hidden state goes on to the next layer's router."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter


class ZayaAdapter(FusedAdapter):
    name = "zaya"
    index_from_router = True

    def matches(self, block: Block) -> bool:
        return super().matches(block) and hasattr(getattr(block, "gate", None), "num_router_classes")

    def fixed_rows(self, block: Block) -> int:
        return 1

    def scoring(self, block: Block) -> tuple[str, nn.Parameter]:
        return "gate.router_mlp.out_proj.weight", block.gate.router_mlp.out_proj.weight

    def reshape_router(self, block: Block, k: int) -> None:
        super().reshape_router(block, k)
        # The router knows the skip by the expert count of its config, which all layers share.
        block.gate.config = copy.copy(block.gate.config)
        block.gate.config.num_experts = k

    def router_index(self, block: Block, output: Any) -> Tensor:
        # The router says "expert 0 with probability 0" for a skip.
        _, weight_TK, index_TK, _ = output
        skip = torch.full_like(index_TK, self.num_experts(block))
        return torch.where((index_TK == 0) & (weight_TK == 0), skip, index_TK)
