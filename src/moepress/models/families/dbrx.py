"""DBRX: all experts under each other in flat 2-D parameters; the block makes the choice."""

from moepress.models.adapter import Block, resized
from moepress.models.layer import CompactSpec, ExpertBank
from moepress.models.linear_router import LinearRouterAdapter


class DbrxAdapter(LinearRouterAdapter):
    name = "dbrx"

    def matches(self, block: Block) -> bool:
        mlp = getattr(getattr(block, "experts", None), "mlp", None)
        return mlp is not None and all(getattr(mlp, name, None) is not None for name in ("w1", "v1", "w2"))

    def read_bank(self, block: Block) -> ExpertBank:
        mlp = block.experts.mlp
        shape = (-1, mlp.ffn_hidden_size, mlp.hidden_size)
        return ExpertBank(
            gate_EFD=mlp.w1.data.view(shape),
            up_EFD=mlp.v1.data.view(shape),
            down_EDF=mlp.w2.data.view(shape).transpose(1, 2),
            activation=lambda gate_TF, up_TF: mlp.activation_fn(gate_TF) * up_TF,
        )

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        mlp = block.experts.mlp
        for name in ("w1", "v1", "w2"):
            old = getattr(mlp, name)
            setattr(mlp, name, resized(old, spec.physical * mlp.ffn_hidden_size, old.shape[1]))
        mlp.moe_num_experts = block.experts.num_experts = spec.physical

    def router_returns_indices(self, block: Block) -> bool:
        return False
