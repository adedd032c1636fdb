"""Step 3.7: the fused layout without its marks; the clamp comes after the activation."""

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter, Layout


class Step3p7Adapter(FusedAdapter):
    name = "step3p7"

    def layout(self, experts: Block) -> Layout | None:
        ours = hasattr(experts, "_fp8_experts_clamp_after_activation") and not hasattr(experts, "is_transposed")
        return Layout() if ours else None
