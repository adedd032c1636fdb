"""DeepSeek-V4's hash layers: a table gives each token of the vocabulary its experts, the router only weighs them."""

from torch import nn

from moepress.models.fused import FusedAdapter


class HashAdapter(FusedAdapter):
    name = "deepseek-v4-hash"

    def matches(self, block: nn.Module) -> bool:
        return super().matches(block) and hasattr(getattr(block, "gate", None), "tid2eid")

    def rows_refusal(self, block: nn.Module) -> str | None:
        return "its table gives each token of the vocabulary its experts by number, and all of them must stay"
